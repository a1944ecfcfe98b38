# SPDX-License-Identifier: Apache-2.0
"""A run's configuration: what is read, what is refused and with which words, what is written back."""

from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.execution import ReshardPolicy
from stretto.models import GPTConfig
from stretto.train.config import ConfigError, ModelConfig, config_to_toml, load_config, make_config
from stretto.train.config.gpt import TrainConfig
from stretto.train.config.options import GridConfig
from stretto.train.config.rules import nearest_grid
from stretto.train.devices import resolve_device
from stretto.train.kinds import KINDS, ModelKind, config_type, kind_of

SMALLEST: dict[str, Any] = {
    "out": "runs/test",
    "model": {"layers": 2, "hidden": 8, "heads": 2},
    "data": {"path": "text.txt"},
    "train": {"steps": 5, "batch": 8, "seq_len": 16},
}


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        make_config(SMALLEST, overrides)
    return str(refused.value)


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_overrides_are_read_as_toml_and_otherwise_as_text() -> None:
    config = make_config(
        SMALLEST,
        [
            "grid.x=2", "grid.z=2", "ranks=4", "train.lr=1e-3", "train.recompute=full", "train.dtype=bf16",
            "out=/tmp/a folder/run=1", 'data.path=["a", "b"]', "model.name='gpt2-small'", "train.steps=1_000",
            "train.clip=none",
        ],
    )  # fmt: skip
    assert config.grid == GridConfig(x=2, z=2)
    assert config.ranks == 4
    assert config.out == Path("/tmp/a folder/run=1")
    assert config.data.path == ["a", "b"]
    assert config.model.name == "gpt2-small"
    assert (config.train.lr, config.train.steps, config.train.dtype) == (1e-3, 1000, "bf16")
    assert config.train.recompute == "full"
    assert config.train.clip is None


def test_modes_of_recomputation_are_read_and_unknown_ones_refused() -> None:
    assert make_config(SMALLEST, ["train.recompute=every:3"]).execution.recompute == "every:3"
    assert make_config(SMALLEST, ["train.recompute=full"]).execution.recompute == "full"
    assert "train.recompute is 'most', but must be one of none, full" in refusal("train.recompute=most")


@pytest.mark.parametrize("folder", ["2024", "2024-01-01", "true", "1e5", "runs/~"])
def test_a_folder_may_look_like_a_number_or_a_date(folder: str) -> None:
    assert make_config(SMALLEST, [f"out={folder}"]).out == Path(folder)


def test_a_folder_in_the_home_folder_is_there_and_not_in_one_called_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert make_config(SMALLEST, ["out=~/runs"]).out == Path("/home/somebody/runs")
    for tilde in ("./~/runs", "~nobody-of-that-name/runs"):
        config = make_config(SMALLEST, [f"out={tilde}"])
        assert config.out == Path(tilde).absolute()
        assert TrainConfig.model_validate_json(config.model_dump_json()) == config


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set 'out=r\\udcffn' is not valid UTF-8"):
        make_config(SMALLEST, ["out=r\udcffn"])
    with pytest.raises(ConfigError, match=r"out is 'r\\udcffn', but must be text in UTF-8"):
        make_config(SMALLEST | {"out": "r\udcffn"})


@pytest.mark.parametrize(
    ("override", "bound"),
    [("model.hidden=1000000000000", 1 << 20), ("model.ffn=100000000000000000000", 1 << 22),
     ("model.layers=100000000", 1 << 12), ("model.vocab=99999999999", 1 << 24), ("train.steps=1" + 400 * "0", 1 << 53)],
)  # fmt: skip
def test_sizes_that_no_machine_has_are_refused_with_the_largest(override: str, bound: int) -> None:
    with pytest.raises(ConfigError, match=f"but must be at most {bound}; {bound} would do"):
        make_config(SMALLEST, [override])


def test_a_gpt_may_set_its_kind() -> None:
    assert make_config(SMALLEST, ["model.kind=gpt"]) == make_config(SMALLEST)
    assert "model.kind is 3, but must be one of gpt, dlrm" in refusal("model.kind=3")


def test_a_table_given_as_override_is_merged_into_its_section() -> None:
    assert make_config(SMALLEST, ["grid.y=2", "grid={x=2, z=2}"]).grid == GridConfig(x=2, y=2, z=2)


def test_ranks_default_to_the_grids_product() -> None:
    assert make_config(SMALLEST, ["grid.x=2", "grid.data=4"]).ranks == 8


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stesp=5", "train.stesp is an unknown option; did you mean train.steps?"),
        ("steps=5", "steps is an unknown option; did you mean train.steps?"),
        ("trian.steps=5", "trian is an unknown section; did you mean train?"),
        ("train.steps=0", "train.steps is 0, but must be at least 1; 1 would do"),
        ("train.steps=2.5", "train.steps is 2.5, but must be a whole number; 2 would do"),
        ("train.steps='10'", "train.steps is '10', but must be a whole number; 10 (a number, without quotes) would do"),
        ("train.steps=many", "train.steps is 'many', but must be a whole number"),
        ("train.steps=true", "train.steps is true, but must be a whole number"),
        ("train.lr=nan", "train.lr is nan, but must be a finite number, for example 0.0003"),
        ("train.lr=-inf", "train.lr is -inf, but must be a finite number"),
        ("train.lr=0", "train.lr is 0, but must be above 0.0; 0.0003 would do"),
        ("train.lr=.5", "train.lr is '.5', but must be a number; 0.5 (a number, without quotes) would do"),
        ("train.beta2=1", "train.beta2 is 1, but must be below 1.0; 0.95 would do"),
        ("train.dtype=bf61", "train.dtype is 'bf61', but must be one of fp32, bf16, fp16, fp64, fp8; did you mean"),
        ("model.bias=1", "model.bias is 1, but must be true or false"),
        ("model.bias=False", "model.bias is 'False', but must be true or false; false (without quotes) would do"),
        ("grid.x=-2", "grid.x is -2, but must be at least 1; 1 would do"),
        ("grid=4", "grid is 4, but must be a section with options of its own"),
        ("data.path=[1]", "data.path is [1], but must be a text or a list of texts"),
        ("data.path=[]", "data.path is [], but must name at least one file or folder"),
        ("model.heads=none", "model.heads is missing: give model.layers, model.hidden and model.heads"),
        ("train.batch=none", "train.batch is 'none', but must be a whole number"),
        ("train.min_lr=1", "train.min_lr is 1.0, but must be at most train.lr; 0.0003 would do"),
        ("train.ema=1", "train.ema is 1, but must be below 1.0"),
        ("train.batch_ramp=[[3, 0]]", "train.batch_ramp has a batch of 0, but must have multiples of"),
        ("train.batch_ramp=[[3, 4], [3, 8]]", "train.batch_ramp has step 3 after 3, but steps rise; 4 would do"),
        ("train.batch_ramp=[[3]]", "train.batch_ramp"),
        ("train.momentum=0.9", "train.momentum is 0.9, but adamw has no momentum"),
        ("train.decay_steps=5", "train.decay_steps is 5, but only train.schedule='wsd' takes it"),
        ("train.schedule=cosin", "train.schedule is 'cosin', but must be one of cosine, linear, wsd, constant"),
        ("train.micro_batch=3", "train.micro_batch is 3, but must divide a rank's 8 sequences"),
        ("ranks=4", "ranks is 4, but the grid data=1 x=1 y=1 z=1 has 1; the grid data=4 x=1 y=1 z=1 would do"),
        ("out.folder=x", "out is 'runs/test', a value, and has no options of its own"),
        ("train.steps", "--set 'train.steps' is not of the form key=value"),
        ("=5", "--set '=5' is not of the form key=value"),
        ("train..steps=5", "--set 'train..steps=5' is not of the form key=value"),
    ],
)  # fmt: skip
def test_errors_have_key_value_rule_and_a_valid_value(override: str, words: str) -> None:
    assert words in refusal(override)


@pytest.mark.parametrize(
    ("options", "words", "mended"),
    [
        (["train.schedule=constant", "train.min_lr=1e-5"], "'constant' never decays to it", "train.min_lr=0.0"),
        (
            ["train.schedule=wsd", "train.steps=9", "train.warmup_steps=2", "train.decay_steps=8"],
            "but 7 steps are left after warm-up; 7 would do",
            "train.decay_steps=7",
        ),
        (
            ["grid.pipe=2", "ranks=2", "train.batch_ramp=[[3, 4]]"],
            "train.micro_batch=4 would do",
            "train.micro_batch=4",
        ),
        (
            ["grid.pipe=2", "ranks=2", "pipeline.schedule=message-driven", "pipeline.virtual_stages=2"],
            "message-driven order takes one stage a rank",
            "pipeline.virtual_stages=1",
        ),
        (["pipeline.cuts=[2, 2]"], "pipeline.cuts", "pipeline.cuts=none"),
    ],
)
def test_what_an_error_of_several_options_proposes_is_taken(options: list[str], words: str, mended: str) -> None:
    assert words in refusal(*options)
    make_config(SMALLEST, [*options, mended])


def test_muon_has_no_separate_state() -> None:
    message = refusal("train.optimizer_state=host", "train.optimizer=muon")
    assert "train.optimizer_state is 'host', but train.optimizer is 'muon'; train.optimizer='adamw'" in message


def test_a_sequence_that_x_cannot_share_is_refused_with_one_that_it_can() -> None:
    options = ["grid.x=3", "ranks=3", "train.batch=4", "train.seq_len=8"]
    message = refusal("train.shard_sequence=true", *options)
    assert "grid.x = 3 must divide a rank's 32 tokens at once" in message
    assert "train.seq_len=9 would do" in message
    make_config(SMALLEST, [*options, "train.shard_sequence=true", "train.micro_batch=none", "train.seq_len=9"])


def test_sequences_that_context_cannot_cut_are_refused_with_those_that_it_can() -> None:
    options = ["grid.context=2", "ranks=2", "train.seq_len=18"]
    assert "2 x grid.context = 4, the number of parts that a sequence is cut into, must divide it; 16 would do" in (
        refusal(*options)
    )
    experts = ["model.num_experts=4", "model.balance=sequence", "train.seq_len=16"]
    assert "grid.context is 2 and model.balance is 'sequence', a loss over each sequence" in refusal(*options, *experts)
    config = make_config(SMALLEST, [*options, "train.seq_len=16"])
    assert (config.grid.sizes()["context"], str(config.grid)) == (2, "data=1 context=2 x=1 y=1 z=1")
    few = refusal("grid.context=4", "ranks=2", "train.seq_len=16")
    assert "the grid data=1 context=2 x=1 y=1 z=1 would do" in few


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.trace=true", "train.cuda_graph and train.trace are both on"),
        ("model.dropout=0.1", "train.cuda_graph is on and model.dropout is 0.1"),
        ("train.recompute=full", "train.cuda_graph and train.recompute are both on"),
        (
            "grid.expert=2",
            "train.cuda_graph is on and grid.expert is 2, but a graph cannot wait for the number of rows",
        ),
    ],
)
def test_a_graph_raises_with_options_that_it_does_not_support(override: str, words: str) -> None:
    assert words in refusal("train.cuda_graph=true", override)


def test_a_reshard_policy_is_read_and_an_unknown_one_refused() -> None:
    for policy in get_args(ReshardPolicy):
        micro_batches = ["ranks=2", "grid.z=2", "train.micro_batch=2"]
        assert make_config(SMALLEST, [*micro_batches, f"train.reshard={policy}"]).execution.reshard == policy
    assert "did you mean 'after_forward'?" in refusal("train.reshard=after_foward")


@pytest.mark.parametrize("option", ["cuda_graph", "writes_copies"])
def test_features_of_gpus_raise_on_a_cpu(option: str) -> None:
    config = make_config(SMALLEST, [f"train.{option}=true", "train.dtype=bf16", "device=cpu"])
    with pytest.raises(ValueError, match=rf"train\.{option} is on, but this run's device is the CPU"):
        resolve_device(config)


def test_invariance_takes_what_an_engine_takes() -> None:
    whole = ["train.invariant=true", "ranks=2"]
    shapeless = ["model.path=there", *(f"model.{name}=none" for name in ("name", "layers", "hidden", "heads"))]
    assert "train.invariant is on, but the model is a GPT of stretto's" in refusal(*whole, "grid.x=2")
    for override, words in (
        ("grid.y=2", "but grid.y is 2: 1 would do"),
        ("grid.context=2", "but grid.context is 2: 1 would do"),
        ("grid.pipe=2", "into 2 stages: one would do"),
    ):
        assert words in refusal(*whole, *shapeless, override)
    assert "but train.dtype is 'fp8': 'bf16' would do" in refusal(*shapeless, whole[0], "train.dtype=fp8")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.dtype=fp32", "train.dtype is 'fp32', in which the weights are kept"),
        ("train.optimizer=sgd", "train.optimizer is 'sgd', and only adamw writes them"),
        ("train.reshard=after_forward", "train.reshard is 'after_forward'"),
    ],
)
def test_copies_that_no_step_would_write_are_refused(override: str, words: str) -> None:
    options = ["train.dtype=bf16", "train.writes_copies=true"]
    assert f"train.writes_copies is on, but {words}" in refusal(*options, override)
    make_config(SMALLEST, options)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("grid.z=1", "grid.z is 1, so that z divides no gradient"),
        ("train.micro_batch=4", "a rank's whole part of the batch is one micro-batch"),
        ("train.micro_batch=none", "a rank's whole part of the batch is one micro-batch"),
    ],
)
def test_gradients_are_accumulated_unsharded_where_they_are_sharded_and_accumulated(override: str, words: str) -> None:
    options = ["ranks=2", "grid.z=2", "train.micro_batch=2", "train.reshard=gradients_after_step"]
    assert make_config(SMALLEST, options).execution.scatters_once
    more = ["ranks=1"] if override == "grid.z=1" else []
    assert f"train.reshard is 'gradients_after_step', but {words}" in refusal(*options, override, *more)


def test_a_batch_that_data_and_z_do_not_divide_names_the_nearest_that_they_do() -> None:
    message = refusal("train.batch=7", "grid.data=2", "grid.z=2")
    assert (
        "train.batch is 7, but grid.data x grid.z = 4 must divide it; the nearest batch that would do is 8" in message
    )


def test_a_micro_batch_names_the_nearest_micro_batch_and_batch() -> None:
    message = refusal("train.batch=20", "grid.z=2", "train.micro_batch=4")
    assert "the nearest that would do is 5, or a train.batch of 16" in message or "or a train.batch of 24" in message


def test_all_errors_are_reported_together() -> None:
    message = refusal("train.steps=0", "model.layres=2", "grid.x=zwei")
    assert len(message.splitlines()) == 4
    for key in ("train.steps", "model.layres", "grid.x"):
        assert key in message


def test_all_that_is_missing_is_listed_with_its_meaning() -> None:
    with pytest.raises(ConfigError) as refused:
        make_config({"train": {}})
    for words in ("out is missing", "data is missing", "train.batch is missing: global batch"):
        assert words in str(refused.value)


def test_a_trial_may_end_before_the_warm_up_does() -> None:
    assert make_config(SMALLEST, ["train.steps=5", "train.warmup_steps=10"]).train.steps == 5


def test_the_nearest_grid_changes_as_few_axes_as_it_can() -> None:
    assert nearest_grid(GridConfig(x=2, z=2), 8) == GridConfig(data=2, x=2, z=2)
    assert nearest_grid(GridConfig(x=2, y=2, z=2), 4).ranks == 4
    assert nearest_grid(GridConfig(data=6), 7) == GridConfig(data=7)
    assert nearest_grid(GridConfig(data=4, x=2, expert=4), 4) == GridConfig(data=4, expert=4)
    assert nearest_grid(GridConfig(data=4, x=2, expert=4), 2) == GridConfig(x=2)
    assert nearest_grid(GridConfig(data=4, x=2, expert=8, expert_tensor="fold"), 2) == GridConfig(x=2)


def test_a_file_is_read_and_the_last_override_wins(tmp_path: Path) -> None:
    path = write(tmp_path, config_to_toml(make_config(SMALLEST)))
    assert load_config(path, ["train.steps=7", "train.steps=9"]).train.steps == 9


def test_the_file_given_is_not_changed_by_overrides() -> None:
    before = deepcopy(SMALLEST)
    make_config(SMALLEST, ["model.layers=7"])
    assert before == SMALLEST


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("out = 'a'\nsteps == 3\n", "line 2"),
        (b"\xff\xfe", "is not valid TOML"),
        ("a = " + "[" * 5_000, "is not valid TOML"),
        ("#\n" * (1 << 19) + "#", "run.toml: is larger than 1048576 bytes, the most a configuration may have"),
        (".".join("a" * 60_000) + " = 1", "longer than 8192 bytes"),
        ("a = 1" + "0" * 5000, "is not valid TOML"),
    ],
    ids=["syntax", "encoding", "nesting", "size", "line", "number"],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(write(tmp_path, content))


def test_a_missing_file_is_refused_with_the_nearest_that_is_there(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    with pytest.raises(ConfigError, match=f"there is no configuration file .*rum.toml; did you mean {path}"):
        load_config(tmp_path / "rum.toml")
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load_config(tmp_path)


def test_a_link_to_nothing_is_not_offered_in_its_own_place(tmp_path: Path) -> None:
    link = tmp_path / "demo.toml"
    link.symlink_to(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match=r"there is no configuration file .*demo.toml$"):
        load_config(link)


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
numbers = st.floats(min_value=1e-300, max_value=1e300, allow_nan=False)


@pytest.mark.long
@settings(deadline=None, max_examples=50)
@given(
    paths=texts | st.lists(texts, min_size=1), lr=numbers, clip=st.none() | numbers, micro=st.sampled_from([None, 2])
)
def test_written_values_are_read_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, paths: Any, lr: float, clip: float | None, micro: int | None
) -> None:
    values = deepcopy(SMALLEST)
    values["data"]["path"] = paths
    values["train"] |= {"lr": lr, "clip": clip, "micro_batch": micro}
    config = make_config(values)
    path = write(tmp_path_factory.getbasetemp(), config_to_toml(config))
    assert load_config(path) == config


def test_a_models_options_are_those_of_the_gpt() -> None:
    assert set(ModelConfig.model_fields) - {"name", "path"} == {field.name for field in fields(GPTConfig)}


def test_a_model_takes_missing_options_from_preset_data_and_sequence_length() -> None:
    own = make_config(SMALLEST).model.to_gpt(data_vocab=256, seq_len=16)
    assert own == GPTConfig(layers=2, hidden=8, heads=2, vocab=256, max_seq_len=16)
    preset = make_config(SMALLEST | {"model": {"name": "gpt2-small", "layers": 1}}).model
    assert preset.known_vocab() == 50257
    assert preset.to_gpt(data_vocab=256, seq_len=16) == GPTConfig.preset("gpt2-small", layers=1)
    with pytest.raises(ValueError, match="did you mean 'gpt2-small'"):
        make_config(SMALLEST, ["model.name=gpt2-smal"]).model.to_gpt(data_vocab=256, seq_len=16)


def test_a_text_that_is_a_boolean_is_told_what_the_text_means() -> None:
    with pytest.raises(ConfigError) as refused:
        make_config({**SMALLEST, "train": {**SMALLEST["train"], "wandb": True}})
    assert "train.wandb is true, but must be a text (also log to this project of Weights & Biases" in str(refused.value)
    assert str(refused.value).endswith("leave it out for none")


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_model_is_found_by_its_name_and_by_its_configuration(name):
    kind = config_type(name)
    assert kind.kind == name
    assert isinstance(kind_of(kind.model_construct()), ModelKind)
