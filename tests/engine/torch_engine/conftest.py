"""Tiny random checkpoints and a dense implementation of the same models, written to be obvious, in float64."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from pdserve.engine.base import Sample, StepPlan, Work
from pdserve.engine.torch_engine.runner import load_engine
from pdserve.wire.messages import ModelCard, SamplingParams

CARD = ModelCard("tiny", "w", "v", max_len=512)
BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama biased": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "llama 3.1": {
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama linear": {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None, "head_dim": 12},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "use_sliding_window": False},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 16,
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    },
}


def tiny_config(family, **changes):
    return {**BASE, **FAMILIES[family], **changes}


def random_weights(config, seed=0):
    """Under the names of Hugging Face, with norms and biases that matter."""
    random = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    qwen2 = config["architectures"] == ["Qwen2ForCausalLM"]
    qkv_bias = qwen2 or config.get("attention_bias")

    def normal(*shape, scale=0.25):
        return torch.randn(*shape, generator=random) * scale

    weights = {"model.embed_tokens.weight": normal(vocab, hidden, scale=1.0), "model.norm.weight": 1 + normal(hidden)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        weights[f"{at}.input_layernorm.weight"] = 1 + normal(hidden)
        weights[f"{at}.post_attention_layernorm.weight"] = 1 + normal(hidden)
        for name, rows, columns, biased in (
            ("self_attn.q_proj", q, hidden, qkv_bias),
            ("self_attn.k_proj", kv, hidden, qkv_bias),
            ("self_attn.v_proj", kv, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, q, config.get("attention_bias")),
            ("mlp.gate_proj", inner, hidden, config.get("mlp_bias")),
            ("mlp.up_proj", inner, hidden, config.get("mlp_bias")),
            ("mlp.down_proj", hidden, inner, config.get("mlp_bias")),
        ):
            weights[f"{at}.{name}.weight"] = normal(rows, columns)
            if biased:
                weights[f"{at}.{name}.bias"] = normal(rows)
        if config["architectures"] == ["Qwen3ForCausalLM"]:
            weights[f"{at}.self_attn.q_norm.weight"] = 1 + normal(size)
            weights[f"{at}.self_attn.k_norm.weight"] = 1 + normal(size)
    return weights


def write_checkpoint(directory, config, weights, shards=1):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    names = sorted(weights)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        save_file({name: weights[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def dense_logits(config, weights, ids):
    """Logits [len(ids), vocab] of a whole sequence: no cache, no pages, no batch, no fused weights; float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    n = len(ids)
    rotations = [_rotation(config, size, position) for position in range(n)]

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * weight

    def linear(x, name):
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def project(x, name, count, norm_name):
        y = linear(x, name).view(n, count, size)
        if norm_name in w:
            y = norm(y, w[norm_name])
        return torch.stack([y[i] @ rotations[i].T for i in range(n)])

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        y = norm(x, w[f"{at}.input_layernorm.weight"])
        q = project(y, f"{at}.self_attn.q_proj", heads, f"{at}.self_attn.q_norm.weight")
        k = project(y, f"{at}.self_attn.k_proj", kv_heads, f"{at}.self_attn.k_norm.weight")
        v = linear(y, f"{at}.self_attn.v_proj").view(n, kv_heads, size)
        attended = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T / math.sqrt(size)
            future = torch.ones(n, n).triu(1).bool()
            attended.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, shared])
        x = x + linear(torch.cat(attended, -1), f"{at}.self_attn.o_proj")
        y = norm(x, w[f"{at}.post_attention_layernorm.weight"])
        gate, up = linear(y, f"{at}.mlp.gate_proj"), linear(y, f"{at}.mlp.up_proj")
        x = x + linear(gate * gate.sigmoid() * up, f"{at}.mlp.down_proj")
    head = w["model.embed_tokens.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T


def _rotation(config, size, position):
    """The rotation of a head's vector at one position, as a matrix [size, size]."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config["rope_theta"] or rope["rope_theta"]
    matrix = torch.zeros(size, size, dtype=torch.float64)
    half = size // 2
    for j in range(half):
        angle = position * _scaled(theta ** (-2 * j / size), rope)
        matrix[j, j] = matrix[j + half, j + half] = math.cos(angle)
        matrix[j, j + half], matrix[j + half, j] = -math.sin(angle), math.sin(angle)
    return matrix


def _scaled(frequency, rope):
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "linear":
        return frequency / rope["factor"]
    if kind != "llama3":
        return frequency
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = min(max((turns - low) / (high - low), 0.0), 1.0)
    return share * frequency + (1 - share) * frequency / rope["factor"]


class Driver:
    """Steps an engine by hand; every sampled token comes with the logprobs of the whole vocabulary."""

    def __init__(self, path, **options):
        settings = {"name": "tiny", "card": CARD, "page_size": 4, "kv_tokens": 256, "max_seq_len": 512, **options}
        self.engine = load_engine(path, eos_token_ids=frozenset({2}), **settings)

    def sample(self, ids, **params):
        return Sample(SamplingParams(**{"temperature": 0.0, "logprobs": 61, **params}), ids, len(ids))

    def work(self, ids, start, end, pages):
        """Compute positions start .. end - 1 of a sequence; sampled when that is all of it."""
        return Work(ids[start:end], start, pages, (self.sample(ids),) if end == len(ids) else ())

    def step(self, *work, copies=()):
        """Logprobs [vocab] of each item that sampled."""
        result = self.engine.step(StepPlan(tuple(work), tuple(copies)))
        assert len(result.tokens) == len(work)
        return [_logprobs(tokens[0]) for tokens in result.tokens if tokens]

    def prefill(self, ids, pages, chunk=None):
        """Chunk by chunk from position 0; logprobs after the last token."""
        ends = [*range(chunk or len(ids), len(ids), chunk or len(ids)), len(ids)]
        for start, end in zip([0, *ends], ends, strict=False):
            drawn = self.step(self.work(ids, start, end, pages))
        (last,) = drawn
        return last


def _logprobs(sampled):
    logprobs = torch.empty(len(sampled.logprob.top), dtype=torch.float64)
    for token, value in sampled.logprob.top:
        logprobs[token] = value
    assert sampled.token_id == int(logprobs.argmax())
    return logprobs


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory):
    """family → (directory, config, weights), made once."""
    made = {}

    def make(family):
        if family not in made:
            config = tiny_config(family)
            weights = random_weights(config)
            directory = tmp_path_factory.mktemp("checkpoint")
            made[family] = (write_checkpoint(directory, config, weights), config, weights)
        return made[family]

    return make


@pytest.fixture(autouse=True)
def _restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tools():
    """What the test modules share; they cannot import each other."""

    class Tools:
        driver = Driver
        config = staticmethod(tiny_config)
        weights = staticmethod(random_weights)
        write = staticmethod(write_checkpoint)

        @staticmethod
        def expected(config, weights, ids):
            """Logprobs [len(ids), vocab] by the dense implementation."""
            return dense_logits(config, weights, ids).log_softmax(-1)

        @staticmethod
        def assert_close(actual, expected):
            torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)

    return Tools
