"""What the pages and the batch may look like must not change a result."""

import random

import pytest
import torch

from pdserve.engine.base import Sample, StepPlan, Work
from pdserve.wire.messages import SamplingParams


def ids_of(seed, n):
    return [random.Random(seed * 1000 + i).randrange(61) for i in range(n)]


@pytest.fixture
def qwen(tiny_checkpoints):
    return tiny_checkpoints("qwen3")


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 8, 16, 31, 40])
def test_chunk_sizes(chunk, qwen, tools):
    path, config, weights = qwen
    ids = ids_of(chunk, 41)
    actual = tools.driver(path).prefill(ids, list(range(11)), chunk=chunk)
    tools.assert_close(actual, tools.expected(config, weights, ids)[-1])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9])
def test_lengths_around_a_page(n, qwen, tools):
    path, config, weights = qwen
    ids = ids_of(n, n)
    actual = tools.driver(path).prefill(ids, list(range(-(-n // 4))))
    tools.assert_close(actual, tools.expected(config, weights, ids)[-1])


def test_any_order_of_pages(qwen, tools):
    path, config, weights = qwen
    ids = ids_of(1, 50)
    pages = random.Random(3).sample(range(64), 13)
    driver = tools.driver(path)
    actual = driver.prefill(ids[:49], pages, chunk=20)
    expected = tools.expected(config, weights, ids)
    tools.assert_close(actual, expected[48])
    (actual,) = driver.step(driver.work(ids, 49, 50, pages))
    tools.assert_close(actual, expected[49])


def test_sequences_of_all_kinds_in_one_step(qwen, tools):
    """Decode of very different lengths, first and later chunks, whole prompts and one-token prompts together."""
    path, config, weights = qwen
    driver = tools.driver(path, kv_tokens=2048)
    sequences = [ids_of(i, n) for i, n in enumerate([130, 3, 1, 40, 9, 70, 17, 26, 2, 33])]
    done = [129, 2, 0, 12, 8, 69, 0, 25, 1, 16]
    order = random.Random(1).sample(range(512), 512)
    tables = [order[50 * i : 50 * i + -(-len(ids) // 4)] for i, ids in enumerate(sequences)]
    for ids, n, pages in zip(sequences, done, tables, strict=True):
        if n:
            driver.step(Work(ids[:n], 0, pages))
    ends = [len(ids) for ids in sequences]
    ends[3] = 30  # a chunk in the middle: nothing is sampled
    work = [driver.work(ids, n, end, pages) for ids, n, end, pages in zip(sequences, done, ends, tables, strict=True)]
    expected = [
        tools.expected(config, weights, ids)[-1] for ids, end in zip(sequences, ends, strict=True) if end == len(ids)
    ]
    tools.assert_close(torch.stack(driver.step(*work)), torch.stack(expected))
    (actual,) = driver.step(driver.work(sequences[3], 30, 40, tables[3]))
    tools.assert_close(actual, tools.expected(config, weights, sequences[3])[-1])


@pytest.mark.parametrize("batch", [2, 16, 17])
def test_a_batch_decodes_as_each_alone(batch, qwen, tools):
    path, _, _ = qwen
    driver = tools.driver(path, kv_tokens=2048)
    sequences = [ids_of(i, 5 + 3 * i) for i in range(batch)]
    tables = [list(range(16 * i, 16 * i + 16)) for i in range(batch)]
    for ids, pages in zip(sequences, tables, strict=True):
        driver.step(Work(ids[:-1], 0, pages))
    work = [driver.work(s, len(s) - 1, len(s), t) for s, t in zip(sequences, tables, strict=True)]
    together = torch.stack(driver.step(*work))
    alone = torch.stack([driver.step(item)[0] for item in work])
    tools.assert_close(together, alone)


def test_prefix_pages_of_another_sequence(qwen, tools):
    path, config, weights = qwen
    first, second = ids_of(1, 23), ids_of(1, 16) + ids_of(2, 9)
    driver = tools.driver(path)
    driver.prefill(first, [9, 8, 7, 6, 5, 4])
    actual = driver.step(driver.work(second, 16, 25, [9, 8, 7, 6, 1, 2, 3]))[0]
    tools.assert_close(actual, tools.expected(config, weights, second)[-1])
    actual = driver.step(driver.work(first, 22, 23, [9, 8, 7, 6, 5, 4]))[0]
    tools.assert_close(actual, tools.expected(config, weights, first)[-1])


def test_copies_come_before_the_work(qwen, tools):
    path, config, weights = qwen
    ids = ids_of(1, 7)
    driver = tools.driver(path)
    driver.step(Work(ids[:6], 0, [0, 1]))
    branches = [[*ids[:6], 40], [*ids[:6], 50]]
    drawn = driver.step(
        driver.work(branches[0], 6, 7, [0, 1]), driver.work(branches[1], 6, 7, [0, 63]), copies=[(1, 63)]
    )
    for actual, branch in zip(drawn, branches, strict=True):
        tools.assert_close(actual, tools.expected(config, weights, branch)[-1])


def test_copies_alone(qwen, tools):
    driver = tools.driver(qwen[0])
    pages = driver.engine.memory.owner
    pages[2].fill_(3.0)
    assert driver.step(copies=[(2, 4), (4, 5)]) == []
    assert torch.equal(pages[5], pages[2])
    assert not pages[3].any()


def test_pages_of_others_are_left_alone(qwen, tools):
    driver = tools.driver(qwen[0])
    pages = driver.engine.memory.owner
    pages.fill_(float("nan"))
    driver.prefill(ids_of(1, 8), [10, 20], chunk=3)
    written = sorted({int(i) for i in (~pages.isnan()).flatten(1).any(1).nonzero()})
    assert written == [10, 20]
    assert not pages[[10, 20]].isnan().any()


def test_samples_are_drawn_from_one_row(qwen, tools):
    path, config, weights = qwen
    ids = ids_of(1, 6)
    expected = tools.expected(config, weights, ids)[-1]
    best = int(expected.argmax())
    greedy = SamplingParams(temperature=0.0)
    random_params = SamplingParams(temperature=1.0, seed=7)
    samples = (
        Sample(greedy, ids, 6),
        Sample(greedy, ids, 6, banned=(best,)),
        Sample(random_params, ids, 6, choice=0),
        *(Sample(random_params, ids, 6, choice=i) for i in range(12)),
    )
    engine = tools.driver(path).engine
    result = engine.step(StepPlan((Work(ids, 0, [0, 1], samples), Work(ids, 0, [2, 3]))))
    drawn, nothing = result.tokens
    assert nothing == ()
    assert drawn[0].token_id == best
    assert drawn[0].logprob is None
    assert drawn[1].token_id == int(expected.argsort(descending=True)[1])
    assert drawn[2] == drawn[3]
    assert len({token.token_id for token in drawn[3:]}) > 1


def test_work_that_does_not_fit_its_pages(qwen, tools):
    engine = tools.driver(qwen[0]).engine
    with pytest.raises(ValueError, match="do not fit"):
        engine.step(StepPlan((Work([1, 2, 3, 4, 5], 0, [0]),)))
    with pytest.raises(ValueError, match="do not fit"):
        engine.step(StepPlan((Work([], 0, [0]),)))


def test_memory_and_layout(qwen, tools):
    engine = tools.driver(qwen[0], page_size=8, kv_tokens=100).engine
    memory, layout = engine.memory, engine.layout
    assert engine.num_pages == 12
    assert (layout.page_size, layout.layers, layout.kv_heads, layout.head_dim, layout.dtype) == (8, 3, 2, 16, "float32")
    assert layout.page_bytes == memory.page_bytes == 3 * 2 * 8 * 2 * 16 * 4
    assert memory.nbytes == 12 * memory.page_bytes
    assert memory.device == "cpu"
    assert memory.owner.data_ptr() == memory.address
    assert memory.owner[1].data_ptr() == memory.address + memory.page_bytes
    assert memory.owner.is_contiguous()
    assert engine.threaded
    assert engine.eos_token_ids == {2}
    assert engine.card.name == "tiny"


def test_close_is_idempotent(qwen, tools):
    engine = tools.driver(qwen[0]).engine
    engine.close()
    engine.close()
    engine.memory.owner[0].fill_(1.0)
    with pytest.raises(RuntimeError, match="closed"):
        engine.step(StepPlan((Work([1], 0, [0]),)))


def test_threads(qwen, tools):
    tools.driver(qwen[0], threads=1)
    assert torch.get_num_threads() == 1
