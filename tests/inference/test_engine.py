# SPDX-License-Identifier: Apache-2.0
"""An engine on ranks gives the tokens and logits of transformers' own models, whatever the grid, the chunks and the
company of a request."""

import math
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.conftest import Ranks
from tests.parallel import hugging_face
from tests.parallel.lora import PeftModel, adapters
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from stretto.inference import Engine, Request, cache, divided_tokens, fused_blocks
from stretto.inference import engine as engines
from stretto.inference.runner import Drawn, StepRunner
from stretto.memory import PeerError, failures
from stretto.ops import matmul_reduce_scatter
from stretto.ops.decoding.paged_kernels import attend_new_tokens
from stretto.ops.decoding.rotary_cache import rotate_and_store
from stretto.ops.moe import dispatch_few
from stretto.parallel import Grid, parallelize
from stretto.parallel.experts import module as experts
from stretto.parallel.layers import embedding

MakeRanks = Callable[[int], Ranks]
DIVIDED = ("llama", "mistral", "qwen3")  # whose tokens an engine may divide over x
NEW = 24  # more than a page of the cache
LENGTHS = (1, 2, 37, 140)
Case = tuple[str, dict[str, Any]]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "mistral": {"sliding_window": 24, "num_attention_heads": 8, "num_key_value_heads": 4},
    "gpt2": {"num_attention_heads": 8, "tie_word_embeddings": True}
    | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "olmo2": {"num_attention_heads": 8, "num_key_value_heads": 2},  # norms over all heads
    "stablelm": {"qk_layernorm": True, "partial_rotary_factor": 0.5, "hidden_dropout": 0.0},  # attention whole on x
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_attention_heads": 8},
}


def make(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = hugging_face.causal_lm(kind, **{"max_position_embeddings": 400, **FAMILIES[kind], **options})
    with torch.no_grad():
        for parameter in model.parameters():  # so that logits differ by more than a rounding
            parameter.normal_(0, 0.3 if parameter.dim() > 1 else 1.0)
    model.generation_config.eos_token_id = None
    return model


def prompts(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(hugging_face.VOCAB) for _ in range(length)] for length in lengths]


def continued(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()


def run_case(new: int, kind: str, sizes: dict[str, int], chunks: tuple[int, ...], given: list[list[int]]) -> list[Any]:
    """Tokens of each chunk size, and the log-probabilities of those of requests that join one after another."""
    grid = Grid(**sizes)
    model = parallelize(make(kind), grid)
    part = given[grid.coordinate("data") :: grid.size("data")]
    found: list[Any] = []
    for chunk in chunks:
        engine = Engine(model, max_batch=3, cache_tokens=1600, chunk=chunk)
        found.append(engine.generate(part, new))
    if kind in DIVIDED and grid.size("x") > 1:  # of 5 tokens or more, which x need not divide
        engine = Engine(parallelize(make(kind), grid), max_batch=3, cache_tokens=1600, chunk=33, divide_from=5)
        with mock.patch.object(divided_tokens, "matmul_reduce_scatter", wraps=matmul_reduce_scatter) as scatter:
            found.append(engine.generate(part, new))
        assert scatter.call_count % 2 == 0  # two a step and block, but the last block
        assert (scatter.call_count > 0) == any(len(prompt) >= 5 for prompt in part)
    engine = Engine(model, max_batch=3, cache_tokens=1600, chunk=50)
    requests: list[Request] = []
    while len(requests) < len(part) or engine.step():
        if len(requests) < len(part):
            requests.append(engine.submit(part[len(requests)], new, log_probabilities=True))
            engine.step()
            engine.step()
    grid.close()
    return [*found, [request.tokens for request in requests], [request.log_probabilities for request in requests]]


def run_cases(cases: list[Any], new: int) -> list[list[Any]]:
    torch.set_num_threads(1)
    return [run_case(new, *case) for case in cases]


def log_probabilities(model: nn.Module, prompt: list[int], tokens: list[int]) -> tuple[Tensor, float]:
    """Those of tokens, and the largest logit, of which a model's own fp32 is right to some 3e-6."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0], float(logits.abs().max())


def check(by_rank: list[list[list[Any]]], cases: list[Any], new: int) -> None:
    for number, (kind, sizes, _, given) in enumerate(cases):
        plain = make(kind)
        expected = [continued(plain, prompt, new) for prompt in given]
        logs = [log_probabilities(plain, *each) for each in zip(given, expected, strict=True)]
        data, x = sizes.get("data", 1), sizes.get("x", 1)
        for rank, of_rank in enumerate(by_rank):
            *tokens, found = of_rank[number]
            first = rank // x % data
            for each in tokens:
                assert each == expected[first::data], (kind, sizes, rank)
            for ours, (theirs, largest) in zip(found, logs[first::data], strict=True):
                torch.testing.assert_close(torch.tensor(ours), theirs, rtol=0, atol=1e-5 * largest)


ON_TWO = [
    ("llama", {"x": 2}, (7,), prompts()),
    ("gpt2", {"x": 2}, (64,), prompts()),
    ("stablelm", {"x": 2}, (64,), prompts(3, (2, 9))),
    ("qwen3_moe", {"data": 2, "expert": 2}, (33,), prompts()),
]


@pytest.mark.long
def test_tokens_and_log_probabilities_are_those_of_transformers(ranks: MakeRanks) -> None:
    check(ranks(2).run(run_cases, ON_TWO, NEW, timeout=300), ON_TWO, NEW)


ON_FOUR = [("qwen3_moe", {"x": 4, "expert": 4, "expert_tensor": "fold"}, (16,), prompts(2, (3, 20, 33)))]
ALL = [
    (kind, {"x": x} | sizes, (1, 5, 64, 512), prompts(x, (1, 2, 3, 64, 129, 300)))
    for kind in FAMILIES
    for x in (1, 2, 4, 8)
    for sizes in ({}, {"data": 8 // x})
    if not (sizes and (x == 8 or (kind == "gpt2" and x == 1)))
]
ALL += [
    ("qwen3_moe", sizes, (7, 300), prompts(5, (1, 2, 3, 64, 129, 300, 9, 11)))
    for sizes in ({"data": 2, "x": 4, "expert": 2}, {"data": 4, "x": 2, "expert": 2}, {"data": 8, "expert": 2})
]


@pytest.mark.long
def test_tokens_and_log_probabilities_on_four_ranks(ranks: MakeRanks) -> None:
    check(ranks(4).run(run_cases, ON_FOUR, NEW, timeout=300), ON_FOUR, NEW)


def measure_threshold(seconds: dict[int, tuple[float, float]]) -> tuple[int | None, list[int]]:
    """The number of tokens from which on they are divided, and the numbers that were measured."""
    fusers, measured = [], []

    class Seen(fused_blocks.BlockFuser):
        def fuse(self, positions: int) -> None:
            super().fuse(positions)
            fusers.append(self)

    def measure(runs: Any, *_: Any) -> Any:
        for run in runs:
            run()
        measured.append(runs[0].args[1])
        return seconds.get(measured[-1])

    with mock.patch.object(engines, "BlockFuser", Seen), mock.patch.object(fused_blocks, "measure_choices", measure):
        engine = Engine(parallelize(make("llama"), Grid(x=2)), max_batch=1, cache_tokens=64, chunk=8)
        assert fusers[0].tokens.least is None  # on a CPU nothing is measured
        with torch.no_grad():
            least = fusers[0].measure(sorted(seconds), torch.zeros(1))
        fusers[0].tokens.least = least
        assert engine.generate([[1, 2, 3, 4, 5]], 2)[0] == continued(make("llama"), [1, 2, 3, 4, 5], 2)
    return least, measured


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({3: (1.0, 2.0), 4: (2.0, 1.0), 8: (2.0, 1.5)}, (4, [8, 4, 3])),
        ({4: (2.0, 1.0), 8: (1.0, 1.0)}, (None, [8])),
    ],
)
def test_tokens_are_divided_from_the_number_on_from_which_that_is_measured_to_be_faster(
    ranks: MakeRanks, seconds: dict[int, tuple[float, float]], expected: tuple[int | None, list[int]]
) -> None:
    assert ranks(2).run(measure_threshold, seconds) == [expected] * 2


def engines_of_some_ranks() -> list[int]:
    """Tokens of an engine of four ranks, of which two have made one more before."""
    pairs = Grid(x=2, data=2)
    model = parallelize(make("llama"), pairs)
    for _ in range(2 if pairs.coordinate("data") else 1):
        Engine(model, max_batch=1, cache_tokens=64).close()
    pairs.close()
    with Engine(parallelize(make("llama"), Grid(x=4)), max_batch=1, cache_tokens=64) as engine:
        return engine.generate([[1, 2, 3]], 2)[0]


@pytest.mark.long
def test_ranks_that_have_made_other_engines_before_make_one_together(ranks: MakeRanks) -> None:
    assert ranks(4).run(engines_of_some_ranks, timeout=60) == [continued(make("llama"), [1, 2, 3], 2)] * 4


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", ALL, ids=lambda case: " ".join(map(str, case[:2])))
def test_tokens_and_log_probabilities_of_every_family_on_every_grid(ranks: MakeRanks, case: Any) -> None:
    count = math.prod(case[1].get(axis, 1) for axis in ("data", "x"))
    check(ranks(count).run(run_cases, [case], 64, timeout=1800), [case], 64)


def refusal(function: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        function()
    return str(caught.value)


def misuse() -> dict[str, str]:
    """What an engine on two ranks of x says to calls that cannot work."""
    said = {}
    grid = Grid(x=2)
    engine = Engine(parallelize(make("llama"), grid), 2, 320)
    said["empty"] = refusal(lambda: engine.generate([[1], []], 4))
    said["vocabulary"] = refusal(lambda: engine.submit([1, 61], 4))
    said["text"] = refusal(lambda: engine.submit("ab", 4))
    said["cache"] = refusal(lambda: engine.submit([1] * 300, 40))
    said["new"] = refusal(lambda: engine.submit([1], 0))
    assert not engine.step()
    engine.submit([1, 2, 3 + grid.coordinate("x")], 4)
    said["others"] = refusal(engine.step)
    said["alone"] = refusal(lambda: engine.generate([[1]] * (1 + grid.coordinate("x")), 4))
    said["after"] = str(
        engine.generate([[1, 2]], 3) == Engine(parallelize(make("llama"), grid), 2, 64).generate([[1, 2]], 3)
    )
    long = Engine(parallelize(make("llama"), grid), 2, 3200)
    said["positions"] = refusal(lambda: long.submit([1] * 390, 40))
    for axis in ("y", "z"):
        other = Grid(**{axis: 2})
        model = parallelize(make("llama"), other)
        said[axis] = refusal(lambda model=model: Engine(model, 2, 320))
    said["sequence"] = refusal(lambda: Engine(parallelize(make("llama"), grid, shard_sequence=True), 2, 320))
    said["divided"] = refusal(lambda: Engine(parallelize(make("gpt2"), grid), 2, 320, divide_from=64))
    said["memory"] = refusal(lambda: Engine(engine.model, 2, 10**12))
    return said


def test_what_cannot_work_is_refused_on_all_ranks_with_what_would_do(ranks: MakeRanks) -> None:
    first, second = ranks(2).run(misuse)
    assert first == second
    expected = {
        "empty": "a prompt is empty",
        "vocabulary": "token 61 of a prompt is outside the vocabulary [0, 61); 60 is its last",
        "text": "a prompt has 'a', but must be token ids",
        "cache": "takes 339 of the 320 tokens of the cache; max_new_tokens=21 would do",
        "new": "max_new_tokens is 0, but must be a whole number, at least 1",
        "others": "ranks that differ only in x were given different requests",
        "alone": "ranks that differ only in x were given different requests",
        "after": "True",
        "positions": "takes 429 of the 400 positions of the model; max_new_tokens=11 would do",
        "y": "has y=2, but an engine runs on data, x and expert: y=1 would do",
        "z": "has z=2, but an engine runs on data, x and expert: z=1 would do",
        "sequence": "shard_sequence=False would do",
        "divided": "divide_from is 64, but this model's tokens are not divided: that takes x > 1",
        "memory": "the engine's cache needs at least ",
    }
    assert {name: text for name, text in expected.items() if text not in first[name]} == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0, but must be a whole number, at least 1"),
        ({"cache_tokens": -3}, "cache_tokens is -3"),
        ({"cache_tokens": 15}, "less than a page of 16; 16 would do"),
        ({"chunk": 0}, "chunk is 0"),
        ({"divide_from": 0}, "divide_from is 0, but must be a whole number, at least 1"),
        ({"divide_from": "fast"}, "divide_from is 'fast', but must be 'auto', None or a whole number"),
        ({"model": make("llama")}, "Engine takes a model that stretto.parallelize has returned"),
    ],
    ids=str,
)
def test_sizes_and_models_are_checked_before_anything_is_allocated(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(**({"model": nn.Linear(1, 1), "max_batch": 1, "cache_tokens": 64} | change))


def test_a_cache_that_a_gpu_has_no_memory_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"mem_get_info": (6_000_000, 0), "memory_reserved": 5_000_000, "memory_allocated": 1_000_000}
    for name, value in free.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    grid = SimpleNamespace(device=torch.device("cuda"))
    Engine._check_room(SimpleNamespace(grid=grid, _cache_tokens=9_984), 1000, 16)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"cache_tokens is 10000, .* 0\.0 GB of each rank, .* 0\.0 GB left; 8992 would"
    ):
        Engine._check_room(SimpleNamespace(grid=grid, _cache_tokens=10_000), 1000, 16)  # type: ignore[arg-type]


def engine_of_one_rank() -> Engine:
    return Engine(parallelize(make("llama"), Grid()), 2, 320)


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.1}, {"num_beams": 2, "suppress_tokens": [3]}], ids=str)
def test_settings_of_generate_that_an_engine_does_not_apply_are_named(settings: dict[str, Any]) -> None:
    model = make("llama")
    model.generation_config.update(do_sample=True, top_p=0.9, no_repeat_ngram_size=0, **settings)
    with pytest.warns(UserWarning, match=", ".join(f"{name}=" + ".*" for name in settings)) as told:
        Engine(parallelize(model, Grid()), 2, 320)
    assert "own logits" in str(told[-1].message)
    assert not any(name in str(told[-1].message) for name in ("top_p", "no_repeat"))


OWN = {"do_sample", "temperature", "top_k", "top_p"}  # which `Engine.generate` has, or has otherwise
UNCHANGING = {"max_length", "renormalize_logits", "remove_invalid_values", "use_mtp", "prompt_lookup_num_tokens"}
UNCHANGING |= {"assistant_early_exit"}  # the same tokens, found faster


def what_generate_does(settings: GenerationConfig, model: Any) -> Any:
    """The processors, criteria and mode of transformers' generate; an error's text for settings that it reads."""
    settings._eos_token_tensor = torch.tensor([5])
    ids = torch.tensor([[3, 4]])
    try:
        found = model._get_logits_processor(settings, input_ids_seq_length=2, encoder_input_ids=ids, device="cpu")
        found += model._get_stopping_criteria(settings, stopping_criteria=None)
        return [*map(type, found), settings.get_generation_mode()]
    except (TypeError, ValueError, AttributeError) as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")
def test_every_setting_by_which_transformers_chooses_other_tokens_is_named() -> None:
    model = make("llama")
    plain = what_generate_does(GenerationConfig(do_sample=True), model)
    read = set()
    for name in set(GenerationConfig().to_dict()) - OWN - UNCHANGING:
        for value in (2, 0.5, True, [[3]], "text"):
            settings = GenerationConfig(do_sample=True)
            setattr(settings, name, value)
            if what_generate_does(settings, model) != plain:
                read.add(name)
                with pytest.warns(UserWarning, match=f"{name}="):
                    engines._warn_of_settings(SimpleNamespace(generation_config=settings))
    assert {"min_p", "stop_strings", "watermarking_config", "encoder_repetition_penalty", "min_new_tokens"} <= read


def test_threads_share_an_engine_and_each_gets_its_own_tokens() -> None:
    engine, found = engine_of_one_rank(), {}
    prompts = [[number + 1, number + 2, number + 3] for number in range(6)]
    expected = [engine.generate([prompt], 6) for prompt in prompts]

    def generate(number: int) -> None:
        found[number] = engine.generate([prompts[number]], 6)

    threads = [threading.Thread(target=generate, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found.get(number) for number in range(len(prompts))] == expected


def test_requests_that_another_threads_failed_step_has_dropped_are_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of_one_rank()

    def drop() -> bool:
        engine._scheduler.clear()  # as a step does that fails
        return False

    monkeypatch.setattr(engine, "step", drop)
    with pytest.raises(ValueError, match=r"a step that another thread has called failed, .* dropped: call again"):
        engine.generate([[1, 2]], 3)


def test_an_engine_holds_each_weight_once() -> None:
    """Joined weights are the model's: a copy of those of queries and gates beside them would be half of a model."""
    model = parallelize(make("llama"), Grid())

    def find_storages() -> list[StorageWeakRef]:
        return [StorageWeakRef(each._local_tensor.untyped_storage()) for each in model.parameters()]

    before = find_storages()
    with closing(Engine(model, 2, 64)):
        is_kept = [old.cdata == new.cdata for old, new in zip(before, find_storages(), strict=True)]
        assert 0 < sum(is_kept) < len(is_kept)  # others were joined
        assert [not each.expired() for each in before] == is_kept


def test_a_closed_engine_and_a_table_that_no_memory_holds_are_refused() -> None:
    engine = engine_of_one_rank()
    cache = weakref.ref(engine._runner.layers[0].keys)
    engine.close()
    engine.close()
    assert cache() is None  # its memory is another engine's to take
    for call in (lambda: engine.generate([[1]], 2), lambda: engine.submit([1], 2), engine.step):
        with pytest.raises(ValueError, match="this engine is closed: make another one of its model"):
            call()
    model = parallelize(make("llama"), Grid())
    for given, message in (
        ({"max_batch": 10**9}, r"an engine's table of max_batch=1000000000 requests needs at least .* GB"),
        ({"max_batch": True}, "max_batch is True, but must be a whole number, at least 1"),
        ({"capture": "no"}, "capture is 'no', but must be True or False"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(model, **({"max_batch": 2, "cache_tokens": 10_000} | given))


def test_a_model_within_wrappers_of_its_adapters_runs_with_them() -> None:
    model = PeftModel(make("llama"))
    for parameter in adapters(model).values():
        nn.init.normal_(parameter, std=0.3)
    given = prompts()[:2]
    expected = [continued(model.base_model.model, prompt) for prompt in given]
    assert expected != [continued(make("llama"), prompt) for prompt in given]
    assert Engine(parallelize(model, Grid()), max_batch=2, cache_tokens=800).generate(given, NEW) == expected


@pytest.fixture(scope="module")
def alone() -> Engine:
    return engine_of_one_rank()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": [1, 2]}, "a prompt is 1, but must be a list of token ids: one list for each prompt"),
        ({"prompts": [None]}, "a prompt is None"),
        ({"prompts": [torch.tensor(3)]}, "a prompt is 3"),
        ({"prompts": [torch.ones(2)]}, "a prompt has 1.0"),
        ({"prompts": [torch.ones(2, dtype=torch.bool)]}, "a prompt has True"),
        ({"stop": 3}, r"stop is 3, but must be a list of token ids: \(\) for none"),
        ({"stop": ["</s>"]}, "stop has '</s>'"),
        ({"stop": [-1]}, r"token -1 of stop is outside the vocabulary \[0, "),
        ({"stop": torch.tensor([1 << 40])}, "token 1099511627776 of stop is outside"),
        ({"max_new_tokens": True}, "max_new_tokens is True, but must be a whole number, at least 1"),
        ({"seed": "x"}, "seed is 'x', but must be a whole number"),
        ({"seed": 1.5}, "seed is 1.5, but must be a whole number"),
        ({"seed": 1 << 63}, "must be of 64 bits; 0 would do"),
        ({"top_k": 2.5}, "top_k is 2.5, but must be a whole number or None"),
        ({"top_k": True}, "top_k is True, but must be a whole number or None"),
        ({"temperature": True}, "temperature is True, but must be a number"),
        ({"top_p": "0.9"}, "top_p is '0.9', but must be a number"),
        ({"top_p": 0.0}, "must be above 0 and at most 1"),
        ({"temperature": None}, "temperature is None, but must be a number"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 1e-310}, "at least 1e-30; 0 would do"),
    ],
    ids=str,
)
def test_requests_that_mean_nothing_are_refused(alone: Engine, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alone.generate(**({"prompts": [[1]], "max_new_tokens": 4} | given))


def test_ids_may_be_tensors_and_an_iterator_of_stops_counts_for_every_prompt(alone: Engine) -> None:
    given = prompts(3, (4, 4))
    texts = alone.generate(given, 8)
    assert alone.generate(torch.tensor(given, dtype=torch.int32), 8) == texts
    ends = [text[2] for text in texts]
    expected = [text[: min(map(text.index, {*ends} & {*text})) + 1] for text in texts]
    for stop in (ends, torch.tensor(ends), iter([*ends, *ends])):
        assert alone.generate(given, 8, stop=stop) == expected
    with pytest.raises(ValueError, match="must be all ranks'"):
        alone.apply_patches([], after=3)


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_waited_for(
    alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, run, wait = [], StepRunner.run, Drawn.wait

    def note_run(*given: Any, **options: Any) -> Drawn:
        order.append("launch")
        return run(*given, **options)

    def note_wait(drawn: Drawn) -> Any:
        order.append("wait")
        return wait(drawn)

    monkeypatch.setattr(StepRunner, "run", note_run)
    monkeypatch.setattr(Drawn, "wait", note_wait)
    alone.generate(prompts(3, (4,)), 5, stop=())
    assert order == ["launch", *["launch", "wait"] * 4, "wait"]


def test_a_step_that_fails_drops_its_requests_and_gives_out_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, given = engine_of_one_rank(), prompts(7, (9, 30))
    expected = engine.generate(given, 12)
    for where, name in ((StepRunner, "run"), (failures, "check")):
        requests = [engine.submit(prompt, 12) for prompt in given]
        for _ in range(4):
            engine.step()
        told = [[*request.tokens] for request in requests]
        with monkeypatch.context() as failing:
            failing.setattr(where, name, raise_peer_error)
            with pytest.raises(PeerError):
                engine.step()
        assert [request.tokens for request in requests] == told
        assert not engine.step()
        assert engine.generate(given, 12) == expected


def test_tokens_may_be_taken_from_a_request_and_one_that_is_cancelled_leaves_its_place(alone: Engine) -> None:
    given = prompts(8, (5, 9, 3, 7))
    expected = [continued(make("llama"), prompt, 6) for prompt in given]
    taken: list[int] = []
    drained, cancelled, never, last = (alone.submit(prompt, 6, stop=()) for prompt in given)
    never.is_done = True
    for number in range(50):
        cancelled.is_done |= number == 3
        if not alone.step():
            break
        taken += [drained.tokens.pop() for _ in drained.tokens]
    assert [taken, last.tokens] == [expected[0], expected[3]]
    assert drained.is_done
    assert not never.tokens
    assert 0 < len(cancelled.tokens) < 6
    assert cancelled.tokens == expected[1][: len(cancelled.tokens)]
    assert alone.generate(given, 6, stop=()) == expected


def test_a_callers_modes_change_no_token() -> None:
    given = prompts(8, (5, 9))
    expected = [continued(make("llama"), prompt, 6) for prompt in given]
    model = parallelize(make("llama"), Grid())
    with torch.inference_mode():
        engine = Engine(model, 2, 320)
        engine.submit(given[0], 6)
        engine.step()
        # On GPUs graphs keep such tensors, to which a call outside of that mode writes.
        assert engine._in_flight is not None
        assert not engine._in_flight[1].values.is_inference()
        assert engine.generate(given, 6) == expected
    engine.load(make("llama"))
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert engine.generate(given, 6) == expected
    assert not model.training


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}], ids=str)
def test_logits_that_are_no_numbers_are_an_error_and_no_tokens(how: dict[str, Any]) -> None:
    engine, other = engine_of_one_rank(), make("llama")
    expected = engine.generate([[1, 2]], 4)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.fill_(math.nan)
    engine.load(other)
    request = engine.submit([1, 2], 4, **how)
    engine.step()
    with pytest.raises(ValueError, match="logits have NaN, or none above -inf: the model"):
        engine.step()
    assert not request.tokens
    engine.load(make("llama"))
    assert engine.generate([[1, 2]], 4) == expected


def raise_peer_error(*_: object, **__: object) -> None:
    raise PeerError("rank 1 did not come")


def test_a_model_that_another_engine_has_taken_over_and_one_without_an_engine_compute_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = engine_of_one_rank()
    first.submit([1, 2], 30)
    first.step()
    second = Engine(first.model, 2, 320)
    with pytest.raises(ValueError, match="another Engine has been made of this engine's model"):
        first.step()
    expected = second.generate([[1, 2]], 4)
    monkeypatch.setattr(StepRunner, "allocate", raise_peer_error)
    with pytest.raises(PeerError):
        Engine(first.model, 2, 320)
    with pytest.raises(ValueError, match="replaced for an engine that could not be made"):
        first.model(input_ids=torch.ones(1, 2, dtype=torch.int64))
    monkeypatch.undo()
    assert Engine(first.model, 2, 320).generate([[1, 2]], 4) == expected


def test_attention_that_runs_twice_in_a_layer_is_refused_and_the_model_goes_on() -> None:
    from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = parallelize(DiffLlamaForCausalLM(DiffLlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)), Grid())
    tokens = torch.ones(1, 2, dtype=torch.int64)
    expected = model.eval()(input_ids=tokens).logits
    with pytest.raises(ValueError, match="DiffLlamaAttention attends twice in a pass, as differential attention does"):
        Engine(model, 2, 320)
    assert torch.equal(model(input_ids=tokens).logits, expected)


def test_a_decoder_whose_forward_counts_other_positions_than_generate_gives_is_refused() -> None:
    model = parallelize(hugging_face.causal_lm("roberta", is_decoder=True), Grid())
    with pytest.raises(ValueError, match="RobertaForCausalLM counts positions from padding"):
        Engine(model, 2, 320)


def test_behind_its_attention_the_last_block_has_only_the_tokens_that_the_head_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, multiply = [], fused_blocks.matmul_all_reduce_norm

    def note(x: Tensor, *given: Any, **named: Any) -> Any:
        rows.append(x.shape[1])
        return multiply(x, *given, **named)

    monkeypatch.setattr(fused_blocks, "matmul_all_reduce_norm", note)
    given = prompts(6, (9, 5))
    assert engine_of_one_rank().generate(given, 2) == [continued(make("llama"), prompt, 2) for prompt in given]
    assert rows == [14, 14, 2, 2] + [2] * 4


@pytest.mark.parametrize("name", ["self_attn", "mlp", "mlp.gate_proj", "input_layernorm", ""], ids=str)
def test_hooks_hold_if_the_engine_was_made_after_them_and_are_refused_later(name: str) -> None:
    plain, model = make("llama"), make("llama")
    seen: dict[bool, Tensor] = {}

    def register(of: nn.Module, is_ours: bool) -> None:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            seen[is_ours] = first.clone()
            first.add_(first.roll(1, -1))  # in place, as a steering vector is

        of.get_submodule("model.layers.1").get_submodule(name).register_forward_hook(hook)

    register(plain, False)
    register(model, True)
    engine = Engine(parallelize(model, Grid()), max_batch=1, cache_tokens=64)
    given = prompts(1, (9,))[0]
    expected = continued(plain, given, 1)
    plain(input_ids=torch.tensor([given]))
    assert engine.generate([given], 1) == [expected]
    torch.testing.assert_close(seen[True], seen[False], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="Register it before the engine is made"):
        register(model, True)


def test_a_sum_of_one_rank_calls_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(torch.ops._c10d_functional, "all_reduce", lambda *given: called.append(given))
    engine_of_one_rank().generate([[1, 2]], 2)
    assert not called


def draw() -> list[Any]:
    """Drawn tokens of a request alone, among others that join and leave, and of transformers' generate."""
    torch.set_num_threads(1)
    grid = Grid(x=2)
    model = parallelize(make("qwen3"), grid)
    given = prompts(4, (5, 30, 2, 17))
    mask = torch.ones(1, 30, dtype=torch.int64)
    plain = model.generate(torch.tensor([given[1]]), attention_mask=mask, max_new_tokens=12, do_sample=False)
    how = {"temperature": 1.0, "top_k": 12, "top_p": 0.9}
    found: list[Any] = [plain[0, 30:].tolist()]
    found.append(Engine(model, 4, 800, chunk=9).generate(given, 12, seed=5, **how))
    found.append([Engine(model, 1, 400).generate([each], 12, seed=5 + i, **how)[0] for i, each in enumerate(given)])
    found.append(Engine(model, 2, 800).generate(given, 12, seed=6, **how))
    ends = found[1][1][7]
    found.append(Engine(model, 2, 800).generate(given, 12, seed=5, stop=[ends], **how))
    return found


@pytest.mark.long
def test_drawn_tokens_depend_on_the_request_alone(ranks: MakeRanks) -> None:
    first, second = ranks(2).run(draw)
    assert first == second
    plain, together, alone, otherwise, stopped = first
    assert together == alone != otherwise
    ends = together[1][7]
    assert stopped == [each[: each.index(ends) + 1] if ends in each else each for each in together]
    assert plain == continued(make("qwen3"), prompts(4, (5, 30, 2, 17))[1], 12)


def decode_few() -> tuple[list[list[int]], list[int]]:
    """Texts of ranks with prompts of 5 and 40 tokens, and how many rows each low-latency exchange may take."""
    grid, limits = Grid(data=2, expert=2), []
    model = parallelize(make("qwen3_moe"), grid)
    engine = Engine(model, 4, 320)

    def dispatch(*given: Any, max_tokens: int) -> Any:
        limits.append(max_tokens)
        return dispatch_few(*given, max_tokens=max_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "dispatch_few", dispatch)
        return engine.generate([prompts(9, (5, 40))[grid.coordinate("data")]], 6), limits


def test_few_tokens_go_to_experts_by_the_low_latency_exchange(ranks: MakeRanks) -> None:
    """But for the first step, in which one of the ranks has 40."""
    plain, given = make("qwen3_moe"), prompts(9, (5, 40))
    found = ranks(2).run(decode_few)
    assert [texts for texts, _ in found] == [[continued(plain, prompt, 6)] for prompt in given]
    layers = plain.config.num_hidden_layers
    assert [limits for _, limits in found] == [[16] * layers * 5] * 2


class Calls(TorchDispatchMode):
    """Lists the operators that have one of these names, or a part of it."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(function) for name in self._names):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "gpt_neox", "phi", "stablelm", "biogpt"])
def test_an_eager_step_reads_no_tensor_of_the_device_on_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hugging_face.causal_lm(kind, pad_token_id=0, max_position_embeddings=400)
    engine = Engine(parallelize(model, Grid()), 2, 320)
    monkeypatch.setattr(embedding, "check_ids", lambda *_: None)  # which reads none on GPUs
    reads, runner = Calls("_local_scalar_dense", "is_nonzero", "nonzero", "aten.equal", "masked_select"), engine._runner

    def listen(*given: Any, **named: Any) -> Any:
        with reads:
            return StepRunner._compute(runner, *given, **named)

    monkeypatch.setattr(runner, "_compute", listen)
    engine.generate([[0, 5, 0], [0]], 3, stop=())
    assert not reads.found


def decode_by_kernels() -> tuple[list[list[int]], list[str], list[str]]:
    """Texts by interpreted kernels, of the second engine of a model, larger than the first; which kernels rotated and
    stored; and what steps called of libraries."""
    calls: list[str] = []
    libraries, compute = Calls("c10d"), StepRunner._compute

    def note(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*given: Any) -> Tensor:
            calls.append(function.__name__)
            return function(*given)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for function in (rotate_and_store, attend_new_tokens):
            patch.setattr(cache, function.__name__, note(function))
        first = Engine(parallelize(make("llama", num_hidden_layers=1), Grid(x=dist.get_world_size())), 2, 16)
        second = Engine(first.model, 2, 64)

        def listen(*given: Any, **named: Any) -> Any:
            with libraries:
                return compute(*given, **named)

        patch.setattr(StepRunner, "_compute", listen)
        return second.generate(prompts(9, (5, 1)), 3), calls, libraries.found


@pytest.mark.long
def test_one_kernel_rotates_and_stores_and_no_library_sums_few_rows(interpret: Callable[..., Any]) -> None:
    plain = make("llama", num_hidden_layers=1)
    layers = plain.config.num_hidden_layers
    for texts, calls, libraries in interpret(2, decode_by_kernels):
        assert texts == [continued(plain, prompt, 3) for prompt in prompts(9, (5, 1))]
        assert calls == ["rotate_and_store"] * layers + ["attend_new_tokens"] * (2 * layers)
        assert not libraries  # whose sums a CUDA graph runs on another stream


def batch() -> list[Any]:
    """Texts of transformers' continuous batching over two ranks, of which each has a copy of the only KV head."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = parallelize(make("qwen3"), Grid(x=2))
    sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    how = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    made = model.generate_batch(prompts(9, (5, 40)), how, continuous_batching_config=sizes, warmup=False)
    again = model.generate(torch.tensor(prompts(9, (5,))), max_new_tokens=6, do_sample=False)
    return [[each.generated_tokens for each in made.values()], again[0, 5:].tolist()]


def test_transformers_batches_run_over_ranks_of_x(ranks: MakeRanks) -> None:
    plain = make("qwen3")
    texts = [continued(plain, prompt, 6) for prompt in prompts(9, (5, 40))]
    assert ranks(2).run(batch) == [[texts, texts[0]]] * 2
    alone = parallelize(make("llama"), Grid(), invariant=True)
    assert "generate_batch: it has its own attention" in refusal(lambda: alone.generate_batch([[1]]))


def generate_to_the_end(end: int) -> Tensor:
    """transformers' own generate of this rank's row, on ranks that divide experts: the rows end at different steps."""
    model = parallelize(make("qwen3_moe"), grid := Grid(data=2, expert=2))
    row = torch.tensor([prompts(8, (6, 6))[grid.coordinate("data")]])
    mask = torch.ones_like(row)
    return model.generate(
        row, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=0
    )


def test_transformers_generate_ends_on_all_ranks_where_experts_are_divided(ranks: MakeRanks) -> None:
    plain = make("qwen3_moe")
    given = prompts(8, (6, 6))
    texts = [continued(plain, prompt, 12) for prompt in given]
    end = next(token for token in texts[0] if token not in texts[1])
    found = ranks(2).run(generate_to_the_end, end)
    assert found[0][0, 6:].tolist() == texts[0][: texts[0].index(end) + 1]
    assert found[1][0, 6:].tolist() == texts[1]
