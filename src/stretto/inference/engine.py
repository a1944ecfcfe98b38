# SPDX-License-Identifier: Apache-2.0
"""`Engine`: generates from a model that `parallelize` has put on a grid of data, x and expert."""

import inspect
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from threading import RLock
from typing import Any, Self

import torch
from torch import Tensor, nn

from stretto.cluster.host_memory import check_room
from stretto.huggingface.attention.paged_attention import refusal_of_decoding
from stretto.huggingface.pretrained_model import adapters_of, is_pretrained_model, unwrap
from stretto.inference.fused_blocks import BlockFuser
from stretto.inference.lockstep import Lockstep
from stretto.inference.requests import Request, Sampling, parse_prompt, parse_stop
from stretto.inference.runner import Drawn, StepRunner, describe
from stretto.inference.sampling import VocabularyPart
from stretto.inference.scheduler import Scheduler, StepPart
from stretto.inference.weights import apply_patches, copy_weights
from stretto.memory import PeerError, failures, shared_gpus
from stretto.ops.moe.few_tokens import MAX_TOKENS
from stretto.parallel.comm.collectives import NO_GROUP
from stretto.parallel.experts.module import ParallelExperts
from stretto.parallel.layers.loss import ParallelHead
from stretto.parallel.state import require_state
from stretto.quantities import require_whole


class Engine:
    """Generates from a transformers model on a grid: a paged cache, and steps in which requests join and leave.

        model = stretto.parallelize(LlamaForCausalLM.from_pretrained(name, dtype=torch.bfloat16), stretto.Grid(x=4))
        engine = Engine(model, max_batch=64, cache_tokens=100_000)
        engine.generate([[1, 15043], [1, 3057, 29871]], max_new_tokens=32)

    model: of any family that `parallelize` has roles for and whose attention is by transformers' interface, also within
    PEFT's wrapper, with its adapters, or torch.compile's. The engine takes it over: it can neither train nor be called
    any longer. max_batch: requests at a time. cache_tokens: of all of them together, whose keys and values are
    allocated now. chunk: tokens of a step; longer prompts take several steps, while other requests decode. page: tokens
    of a page of the cache. capture: on a GPU, replay a CUDA graph for each size of a batch that only decodes, and for a
    whole chunk of a single prompt. invariant: True refuses a model that `parallelize(..., invariant=True)` has not made
    so, whose log-probabilities have the same bits in every batch, with every chunk and on every grid (None: as the
    model is). divide_from: steps of at least so many tokens divide them over x between products, which gather and
    scatter them, in place of summing on every rank ("auto": from the number on from which this is measured to be
    faster, on GPUs; None: never).

    Ranks of x compute parts of the same requests and must make the same calls; ranks of data have requests of their
    own. Where experts are divided over data, these step together, and so must call `step`, or `generate`, equally
    often. Before a step is launched, the ranks that would wait for each other compare it.

    Raises ValueError, before it allocates anything, for a model that is not on a grid, or not of a family that can
    decode; for y, z, pipe or context > 1; and for sizes that are not positive. Collective.
    """

    @torch.inference_mode(mode=False)  # or weights that are joined and the cache could be written to there alone
    def __init__(
        self,
        model: nn.Module,
        max_batch: int,
        cache_tokens: int,
        *,
        chunk: int = 2048,
        page: int = 16,
        capture: bool = True,
        invariant: bool | None = None,
        divide_from: int | str | None = "auto",
    ) -> None:
        sizes: dict[str, Any] = {"max_batch": max_batch, "cache_tokens": cache_tokens, "chunk": chunk, "page": page}
        if isinstance(divide_from, str) and divide_from != "auto":
            raise ValueError(f"divide_from is {divide_from!r}, but must be 'auto', None or a whole number")
        sizes |= {} if divide_from in (None, "auto") else {"divide_from": divide_from}
        sizes = {name: require_whole(name, value) for name, value in sizes.items()}
        max_batch, cache_tokens, chunk, page = (sizes[name] for name in ("max_batch", "cache_tokens", "chunk", "page"))
        divide_from = sizes.get("divide_from", divide_from)
        if not isinstance(capture, bool):
            raise ValueError(f"capture is {capture!r}, but must be True or False")
        if cache_tokens < page:
            raise ValueError(f"cache_tokens is {cache_tokens}, less than a page of {page}; {page} would do")
        state = require_state(model, "Engine")
        grid = state.grid
        for axis in ("pipe", "context", "y", "z"):
            if grid.size(axis) > 1:
                raise ValueError(
                    f"{grid!r} has {axis}={grid.size(axis)}, but an engine runs on data, x and expert: "
                    f"{axis}=1 would do, with x or data for its ranks (`copy_weights` brings weights from any grid)"
                )
        if state.options.shard_sequence:
            raise ValueError(
                "shard_sequence is on, but an engine divides tokens by itself (`divide_from`); shard_sequence=False "
                "would do"
            )
        self.is_invariant = state.options.invariant
        if invariant is not None and invariant != self.is_invariant:
            raise ValueError(
                f"invariant is {invariant}, but the model was parallelized with invariant={self.is_invariant}: "
                f"parallelize(..., invariant={invariant}) would do"
            )
        if any(getattr(config, "is_prompt_learning", False) for _, config in adapters_of(model)):
            raise ValueError("an engine runs PEFT's adapters of weights, and not those that add tokens to each prompt")
        model = unwrap(model)
        if not is_pretrained_model(model):
            raise ValueError(f"{type(model).__name__} is not a transformers model, whose attention an engine replaces")
        if refusal := refusal_of_decoding(model, list(inspect.signature(model.forward).parameters)):
            raise ValueError(f"an engine cannot run this model: {refusal}")
        config: Any = model.config
        self.model, self.grid = model.eval(), grid
        self.vocab = int(config.vocab_size)
        limit = getattr(config, "max_position_embeddings", None)
        self._pages = cache_tokens // page
        self._cache_tokens = self._pages * page
        self._longest = min(self._cache_tokens, limit or self._cache_tokens)
        self._limit, self._chunk = limit, chunk
        self._stop = _stop_tokens(model)
        _warn_of_settings(model)
        head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        part = VocabularyPart(0, self.vocab, NO_GROUP)
        if isinstance(head, ParallelHead):
            head.gathers_logits = False
            x = grid.communicator("x")
            part = VocabularyPart(head.first_row, -(-head.vocab // x.size()), x)
        slots: dict[str, Any] = {"slots": max_batch, "longest": self._longest, "page": page, "chunk": chunk}
        # An invariant engine's bits are a trainer's, whose SiLU is rounded before its product with what it gates unless
        # it is fused, and so are products with cosines, which are fused on GPUs alone.
        fuses = not self.is_invariant or state.options.fused == "auto"
        turns = fuses and (not self.is_invariant or grid.device.type == "cuda")
        self._runner = StepRunner(
            model, part, grid.device, **slots, is_invariant=self.is_invariant, fuses_rotation=turns
        )
        self._max_batch = max_batch
        self._in_flight: tuple[list[StepPart], Drawn] | None = None
        self._lock, self._is_closed = RLock(), False
        self._lockstep = Lockstep(grid)
        fuser = BlockFuser(
            model, grid.group("x"), fuses_gates=fuses, fuses_angles=not self.is_invariant or grid.device.type == "cuda"
        )
        probes = self._runner.probe(fuser)
        shapes, (like, *_) = zip(*((probe.shape, probe.like) for probe in probes), strict=True)
        for shape in shapes:
            if shape is None:
                raise ValueError(f"{type(model).__name__} has attention that a pass over token ids alone does not call")
            if shape.key != shape.value:
                raise ValueError(
                    f"{type(model).__name__} has keys of {shape.key} features and values of {shape.value} (latent "
                    "attention), but a paged cache has those of one size"
                )
        token_bytes = sum(shape.heads * (shape.key + shape.value) for shape in shapes) * like.element_size()
        self._check_room(token_bytes, page, self._runner.count_table_bytes(max(shape.heads for shape in shapes)))
        self._scheduler = Scheduler(max_batch, self._pages, page, chunk)
        fuser.fuse(self._longest)
        for module in model.modules():
            module.register_forward_hook = module.register_forward_pre_hook = _refuse_hook  # type: ignore[method-assign]
        self._divide_tokens(fuser, divide_from, like)
        self._runner.allocate(shapes, like, self._pages + 1)
        # Collectives of ranks that share a GPU go by way of the host, which no graph holds.
        is_staged = shared_gpus.is_enabled() and grid.size("stage") > 1
        self._few = FewTokens(model, max_batch)
        self._runner.is_captured = capture and grid.device.type == "cuda" and not is_staged and not self._few.waits
        self._batches = _batch_sizes(max_batch)

    @torch.no_grad()
    def _divide_tokens(self, fuser: BlockFuser, least: int | str | None, like: Tensor) -> None:
        """Have steps of at least so many tokens divide them over x; "auto": of as many as is measured to be faster."""
        can_divide = fuser.can_divide and self.grid.size("x") > 1 and not self.is_invariant
        if isinstance(least, int):
            if not can_divide:
                raise ValueError(
                    f"divide_from is {least}, but this model's tokens are not divided: that takes x > 1, blocks of "
                    "Llama's form without experts, no engine of this model before, and invariant=False; "
                    "divide_from=None would do"
                )
            fuser.tokens.least = least
        elif least == "auto" and can_divide and like.is_cuda and not shared_gpus.is_enabled():
            sizes = [1 << power for power in range(8, min(self._chunk, self._cache_tokens).bit_length())]
            fuser.tokens.least = fuser.measure(sizes, like)

    def _check_room(self, token_bytes: int, page: int, table_bytes: int = 0) -> None:
        """ValueError if this rank has no memory for the cache. token_bytes: of a token, of all layers. table_bytes: of
        the slots of `max_batch` requests."""
        device, needed = self.grid.device, (self._cache_tokens + page) * token_bytes
        if device.type != "cuda":
            ranks = self.grid.communicator("world").size()
            check_room(table_bytes, ranks, f"an engine's table of max_batch={self._max_batch} requests", "max_batch")
            check_room(needed + table_bytes, ranks, "the engine's cache", "cache")
            return
        needed += table_bytes
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        free -= torch.cuda.memory_allocated(device)
        if needed > free:
            most = int(0.9 * free / token_bytes) // page * page
            raise ValueError(
                f"cache_tokens is {self._cache_tokens}, whose keys and values take {needed / 1e9:.1f} GB of each rank, "
                f"but this one's GPU has {free / 1e9:.1f} GB left; {most} would do"
            )

    def generate(
        self,
        prompts: Sequence[Any],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Iterable[int] | None = None,
    ) -> list[list[int]]:
        """The tokens that continue each prompt; with those that end them, as transformers' `generate` has.

        prompts: lists or tensors of token ids; those of this rank's data coordinate. Prompt i is drawn with the seed
        `seed` + i; other arguments are `submit`'s. Raises what `submit` does, before any is run. Collective.
        """
        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        options["stop"] = self._stop if stop is None else parse_stop(stop, self.vocab)  # once: an iterator ends
        requests = [
            self._parse(prompt, max_new_tokens, seed=seed + number if number else seed, **options)
            for number, prompt in enumerate(prompts)
        ]
        for request in requests:
            self._scheduler.submit(request)
        while self.step():
            pass
        if not all(request.is_done for request in requests):
            raise ValueError("a step that another thread has called failed, and all requests were dropped: call again")
        return [request.tokens for request in requests]

    def submit(
        self,
        prompt: Any,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Iterable[int] | None = None,
        log_probabilities: bool = False,
    ) -> Request:
        """Queue a request, which joins at one of the next steps; its `tokens` grow until it `is_done`.

        temperature, top_k, top_p, seed: see `stretto.inference.requests.Sampling`. stop: tokens that end it (None: the
        model's own). Raises ValueError for an empty prompt, ids outside of the vocabulary, and a request that is longer
        than the cache or the model's positions.
        """
        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        request = self._parse(prompt, max_new_tokens, stop=stop, log_probabilities=log_probabilities, **options)
        self._scheduler.submit(request)
        return request

    def step(self) -> bool:
        """Launch a step, and take the tokens of the one before. Returns False once there is nothing left to do.

        A request's tokens arrive a step after they were launched, so that the device never waits for the host.
        Collective. Raises ValueError where ranks that must step together do not, and for an engine whose model another
        one has taken over; PeerError that names the ranks that failed, where a collective or a kernel has waited for
        them in vain. Whatever it raises, all requests are dropped: no token is given out that a failed step may have
        computed.
        """
        with self._lock:  # several threads may serve requests
            try:
                return self._step()
            except BaseException as error:
                self._scheduler.clear()
                self._in_flight = None
                if isinstance(error, RuntimeError) and not isinstance(error, PeerError):
                    self._lockstep.name_failed(error)
                raise

    @torch.inference_mode(mode=False)  # or calls outside of it could not write to what graphs and workspaces keep
    def _step(self) -> bool:
        self._require_open()
        if self.model.training:  # a trainer's call for all of its models; dropout would change tokens
            self.model.eval()
        self._runner.join(self._scheduler.admit())
        parts = self._scheduler.next_parts()
        step = describe(parts, self._rows(parts), self._max_batch, self._runner.page)
        most = self._lockstep.agree(step, has_work=bool(parts))
        launched = (parts, self._runner.run(step, may_replay=self._few.choose(most))) if most else None
        before, self._in_flight = self._in_flight, launched
        if before is not None:
            self._take(*before)
        return launched is not None or before is not None

    def load(self, model: nn.Module) -> None:
        """Copy weights from a model on any grid of this job, or on none, into this engine's, in place.

        CUDA graphs stay valid. Requests that run go on with the new weights, over what the old ones have cached. See
        `copy_weights`. Collective over the job.
        """
        with self._lock:
            copy_weights(model, self.model)

    def apply_patches(self, patches: Iterable[bytes], *, after: int | None = None) -> int:
        """Apply all ranks' patches of a step (`WeightChanges`) to the weights, in place: see `apply_patches`."""
        with self._lock:
            return apply_patches(self.model, patches, after=after)

    def close(self) -> None:
        """Free the cache and the CUDA graphs, before the process group is destroyed, and what shows that this rank
        lives."""
        with self._lock:
            self._is_closed = True
            self._runner.close()
            self._lockstep.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("this engine is closed: make another one of its model")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _parse(
        self, prompt: Any, max_new_tokens: int, *, stop: Any, log_probabilities: bool = False, **sampling: Any
    ) -> Request:
        self._require_open()
        ids = parse_prompt(prompt, self.vocab)
        max_new_tokens = require_whole("max_new_tokens", max_new_tokens)
        ends = self._stop if stop is None else parse_stop(stop, self.vocab)
        request = Request(ids, max_new_tokens, Sampling(**sampling), ends, log_probabilities)
        for limit, what in ((self._limit, "positions of the model"), (self._cache_tokens, "tokens of the cache")):
            if limit is not None and request.positions > limit:
                most = limit + 1 - len(ids)
                nearest = f"max_new_tokens={most} would do" if most > 0 else f"a prompt of {limit} tokens would do"
                raise ValueError(
                    f"a prompt of {len(ids)} tokens with max_new_tokens={max_new_tokens} takes {request.positions} of "
                    f"the {limit} {what}; {nearest}"
                )
        return request

    def _rows(self, parts: Sequence[StepPart]) -> int:
        """Rows of the step: of one that only decodes, those of its CUDA graph."""
        if self._runner.is_captured and not any(part.is_prompt for part in parts):
            return self._batches[bisect_left(self._batches, max(1, len(parts)))]
        return max(1, len(parts))

    def _take(self, parts: Sequence[StepPart], drawn: Drawn) -> None:
        """Give requests the tokens that a step has drawn. ValueError where logits have NaN."""
        tokens, logs = drawn.wait()
        failures.check()  # kernels of a step whose wait has failed leave numbers that are no tokens
        rows = list(zip(parts, tokens, logs, strict=False))  # rows that fill the batch come last
        if any(part.draws and token < 0 for part, token, _ in rows):
            raise ValueError(
                "a token's logits have NaN, or none above -inf: the model's weights, or what it computes of them, "
                "are NaN or infinite. All requests were dropped"
            )
        for part, token, log in rows:
            if part.draws and not part.place.request.is_done:  # it may have ended a step before the host knew
                part.place.request.add(token, log)


class FewTokens:
    """Chooses the exchange of experts that ranks divide: with few tokens on each rank the low-latency one.

    limit: the most tokens of a rank that it takes; 0 where no experts are divided, or a token's bits must be those of
    any grid. waits: a forward pass makes the host wait for the numbers of rows that ranks send to each other's experts.
    """

    def __init__(self, model: nn.Module, max_batch: int) -> None:
        experts = [module for module in model.modules() if isinstance(module, ParallelExperts)]
        self._experts = [each for each in experts if each.takes_few]
        size = 1 << max(4, (max_batch - 1).bit_length())
        self.limit = min(size, MAX_TOKENS) if self._experts else 0
        waiting = any(each.plan.group is not None and each.plan.max_rows is None for each in experts)
        self.waits = waiting and not self.limit

    def choose(self, tokens: int) -> bool:
        """Choose for a step with at most so many tokens on each rank. False if a graph cannot hold what is chosen."""
        few = self.limit if 0 < tokens <= self.limit else None
        for experts in self._experts:
            experts.few_tokens = few
        return few is not None or not any(each.plan.max_rows is None for each in self._experts)


def _refuse_hook(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "this model is an engine's, whose kernels compute several modules at once, and whose CUDA graphs call none: a "
        "hook would see other tensors, or be left out. Register it before the engine is made (with capture=False on "
        "GPUs), which then leaves its module as it is"
    )


def _batch_sizes(max_batch: int) -> list[int]:
    """The sizes of batches that have a graph: powers of two up to 16, then multiples of 16, of 64 from 256 on."""
    sizes = [*(1 << power for power in range(5)), *range(32, 257, 16), *range(320, max_batch + 64, 64)]
    return [*(size for size in sizes if size < max_batch), max_batch]


def _stop_tokens(model: Any) -> frozenset[int]:
    """The tokens that end a text, as the model's generation settings say."""
    settings = getattr(model, "generation_config", None)
    ends = getattr(settings, "eos_token_id", None)
    return frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)


_NEUTRAL = {
    "repetition_penalty": 1, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "guidance_scale": 1, "num_beams": 1, "penalty_alpha": 0, "dola_layers": None,
    "constraints": None, "force_words_ids": None, "min_length": 0, "min_new_tokens": 0, "max_time": None,
    "bad_words_ids": None, "sequence_bias": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
    "stop_strings": None, "token_healing": False, "watermarking_config": None,
    "min_p": 0, "typical_p": 1, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0,
}  # fmt: skip
"""Generation settings, other than those that `Engine.generate` has, that change which tokens are chosen or may be
drawn, or where a text ends, and values that change nothing."""


def _warn_of_settings(model: Any) -> None:
    """Warn of settings of a model's `generate` that an engine, which draws from its own logits, does not apply."""
    settings = getattr(model, "generation_config", None)
    given = {name: getattr(settings, name, None) for name in _NEUTRAL}
    named = [f"{name}={value}" for name, value in given.items() if value not in (None, [], _NEUTRAL[name])]
    if named:
        warnings.warn(
            f"the model's generation_config has {', '.join(named)}, but an engine draws from the model's own logits: "
            "its tokens are not those of transformers' generate",
            stacklevel=3,
        )
