# SPDX-License-Identifier: Apache-2.0
"""Trainer and SFTTrainer train a parallelized model as they train the plain one in one process."""

import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import load_file
from transformers import default_data_collator

from stretto.axes import BATCH
from stretto.huggingface import trainer as plugin
from stretto.huggingface import trainer_plugin
from stretto.parallel import Grid, gather, parallelize
from tests.conftest import Ranks
from tests.huggingface import loops

MakeRanks = Callable[[int], Ranks]


def train(
    grid: Grid | None, name: str, kind: str, out: Path, *, resume: bool | str | None = None, **options: Any
) -> dict[str, Any]:
    """Train as `name` does; returns what was logged, and the weights."""
    torch.manual_seed(0)
    model = loops.make_model(kind)
    base: Any = {"Trainer": transformers.Trainer, "SFTTrainer": trl.SFTTrainer}[name]
    if grid is not None:
        model, base = parallelize(model, grid), trainer_plugin(base)
    parts = 1 if grid is None else grid.size(BATCH)
    is_sft = name == "SFTTrainer"
    arguments = loops.make_arguments(out, parts, trl.SFTConfig if is_sft else transformers.TrainingArguments, **options)
    data: dict[str, Any] = {
        "train_dataset": loops.make_rows(),
        "eval_dataset": loops.make_rows(12, seed=6),
    }  # 12 rows are a batch and a half
    data |= {"data_collator": default_data_collator}
    if is_sft:
        texts = loops.make_texts()
        data = {"train_dataset": texts, "eval_dataset": texts.select(range(16))}
        data |= {"processing_class": loops.make_tokenizer()}
    trainer = base(model=model, args=arguments, **data)
    trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()
    predicted = None if is_sft else trainer.predict(data["eval_dataset"]).predictions
    return {
        "loss": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "grad_norm": [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each],
        "eval_loss": evaluated["eval_loss"],
        "predicted": predicted[0] if isinstance(predicted, tuple) else predicted,
        "tokens": [each["num_tokens"] for each in trainer.state.log_history if "num_tokens" in each],
        "flops": trainer.state.total_flos,
        "weights": {name: gather(value).detach() for name, value in model.state_dict(keep_vars=True).items()},
    }


def train_on_grid(sizes: dict[str, int], *args: Any, **options: Any) -> dict[str, Any]:
    with loops.launched():
        return train(Grid(**sizes), *args, **options)


def train_alone(*args: Any, **options: Any) -> dict[str, Any]:
    with loops.launched():
        return train(None, *args, **options)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(expected["loss"]) == loops.STEPS
    for key in ("loss", "grad_norm", "eval_loss"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    if expected["predicted"] is not None:
        assert found["predicted"] == pytest.approx(expected["predicted"], rel=1e-2, abs=1e-3)
    for name, value in expected["weights"].items():  # Adam divides small differences by small gradients
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-4)


def check_folder(folder: Path, expected: Path) -> None:
    """The folder has the files and tensors that transformers has written in one process."""
    found = {name: load_file(each / "model.safetensors") for name, each in (("own", folder), ("theirs", expected))}
    assert list(found["own"]) == list(found["theirs"])
    for name, value in found["theirs"].items():
        torch.testing.assert_close(found["own"][name], value, rtol=1e-4, atol=1e-4)
    assert (folder / "config.json").read_text() == (expected / "config.json").read_text()
    own, theirs = ({file.name for file in each.iterdir()} for each in (folder, expected))
    assert own - {"optimizer"} == theirs - {"optimizer.pt"}
    transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.long
def test_trainer_equals_one_process_and_resumes_on_another_grid(ranks: MakeRanks, tmp_path: Path) -> None:
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    expected = train_alone("Trainer", "llama", tmp_path / "alone", **saves)
    for found in ranks(2).run(train_on_grid, {"z": 2}, "Trainer", "llama", tmp_path / "z", **saves):
        check_same(found, expected)
    assert found["flops"] == pytest.approx(expected["flops"])
    check_folder(tmp_path / "z" / "checkpoint-3", tmp_path / "alone" / "checkpoint-3")
    assert sorted(path.name for path in (tmp_path / "z").iterdir()) == ["checkpoint-3", "checkpoint-5"]
    for found in ranks(2).run(
        train_on_grid,
        {"x": 2},
        "Trainer",
        "llama",
        tmp_path / "x",
        resume=str(tmp_path / "z" / "checkpoint-3"),
        **saves,
    ):
        check_same(found, expected)


GRIDS: list[dict[str, int]] = [
    {"x": 2},
    {"z": 2},
    {"data": 2, "z": 2},
    {"x": 2, "z": 2},
    {"z": 4},
    {"context": 2, "z": 2},
]
CASES = {"Trainer qwen3_moe": [], "SFTTrainer llama": [], "SFTTrainer qwen3_moe": [0, 2]}
"""The grids that are long for a case; all begin with the first, whose checkpoint the others resume."""


@pytest.mark.parametrize(
    ("case", "grids"),
    [
        *(
            pytest.param(case, [GRIDS[each] for each in long], marks=pytest.mark.long)
            for case, long in CASES.items()
            if long
        ),
        *(pytest.param(case, GRIDS, marks=pytest.mark.exhaustive) for case in CASES),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_each_trainer_equals_one_process_on_each_grid(
    case: str, grids: list[dict[str, int]], ranks: MakeRanks, tmp_path: Path
) -> None:
    name, kind = case.split()
    saves = {"save_strategy": "steps", "save_steps": 3}
    expected = train_alone(name, kind, tmp_path / "alone", **saves)
    resume = None
    for number, sizes in enumerate(grids):
        out = tmp_path / str(number)
        for found in ranks(prod(sizes.values())).run(train_on_grid, sizes, name, kind, out, resume=resume, **saves):
            check_same(found, expected)
        assert resume or found["tokens"] == expected["tokens"]  # SFTTrainer counts from a resumed step on
        check_folder(out / "checkpoint-5", tmp_path / "alone" / "checkpoint-5")
        resume = str(tmp_path / "0" / "checkpoint-3")  # of the first grid, on all others


def answer(sizes: dict[str, int] | None, kind: str, out: Path) -> tuple[list[float], str]:
    """Train a BERT on 6 rows, 4 a batch, so that of 2 ranks the second has none of the last batch's.

    Returns the losses, also of evaluation, and the first warning of repeated rows.
    """
    torch.manual_seed(0)
    shape = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        **shape, **dropout, intermediate_size=16, num_labels=1 + (kind == "QuestionAnswering")
    )
    model: Any = getattr(transformers, f"BertFor{kind}")(config)
    tokens = torch.randint(32, (6, 8))
    targets: dict[str, list[Any]] = {"start_positions": [0, 3, 1, 2, 5, 7], "end_positions": [4, 7, 7, 3, 5, 7]}
    if kind != "QuestionAnswering":
        targets = {"labels": [0.5, 2.0, -1.0, 0.0, 3.0, -2.0]}
    rows = Dataset.from_dict({"input_ids": tokens.tolist(), **targets})
    with loops.launched(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        grid = None if sizes is None else Grid(**sizes)
        parts = 1 if grid is None else grid.size(BATCH)
        base: Any = transformers.Trainer if grid is None else trainer_plugin(transformers.Trainer)
        arguments = loops.make_arguments(
            out,
            parts,
            transformers.TrainingArguments,
            per_device_train_batch_size=4 // parts,
            per_device_eval_batch_size=4 // parts,
            gradient_accumulation_steps=1,
            max_steps=3,
        )
        model = model if grid is None else parallelize(model, grid)
        data = {"train_dataset": rows, "eval_dataset": rows, "data_collator": default_data_collator}
        trainer = base(model=model, args=arguments, **data)
        trainer.train()
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        losses.append(trainer.evaluate()["eval_loss"])
    return losses, next((str(each.message) for each in warned if "repeated" in str(each.message)), "")


def test_repeated_rows_have_no_answers_and_are_named_where_the_loss_counts_them(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    expected, _ = answer(None, "QuestionAnswering", tmp_path)
    for losses, warning in ranks(2).run(answer, {"z": 2}, "QuestionAnswering", tmp_path):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert not warning
    for _, warning in ranks(2).run(answer, {"z": 2}, "SequenceClassification", tmp_path):
        assert "2 rows for 2 ranks of 2: the first ones are repeated, and count in the loss, as labels" in warning


def own_loss(base: Any) -> Any:
    """A Trainer whose loss is the mean over each rank's own rows."""

    class OwnLoss(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return (loss, outputs) if return_outputs else loss

    return OwnLoss


def fail() -> None:
    raise OSError("no space left")


def refuse(out: Path) -> dict[str, str]:
    """Return what is said of arguments without support, and of a checkpoint that one rank cannot write."""
    grid, messages = Grid(z=2), {}
    rows, base = loops.make_rows(), transformers.Trainer

    def make(model: Any, base: Any = base, folder: str = "", **options: Any) -> Any:
        arguments = loops.make_arguments(out / folder, 2, transformers.TrainingArguments, **options)
        return trainer_plugin(base)(
            model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator
        )

    def note(name: str, call: Callable[[], Any], kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind) as caught:
            call()
        messages[name] = str(caught.value)

    with loops.launched():
        model = parallelize(loops.make_model("llama"), grid)
        note("not on a grid", lambda: make(loops.make_model("llama")))
        note("fp16", lambda: make(model, fp16=True))
        note("own loss", lambda: make(model, own_loss(base)).train())
        note("smoothed", lambda: make(model, label_smoothing_factor=0.1).train())
        note(
            "a stock checkpoint", lambda: make(model).train(resume_from_checkpoint=str(out / "alone" / "checkpoint-3"))
        )
        trainer = make(model, folder="kept", save_strategy="steps", save_steps=3)
        trainer.train()
        trainer.state.global_step = 9
        if trainer.args.should_save:
            trainer.lr_scheduler.state_dict = fail
        note("a failed save", lambda: trainer._save_checkpoint(model, None), OSError)
        gpt2 = loops.make_model("gpt2")
        expected = set(trainer.get_decay_parameter_names(gpt2))
        assert set(trainer.get_decay_parameter_names(parallelize(gpt2, grid))) == expected
    return messages


@pytest.mark.long
def test_what_the_plugin_does_not_support_is_refused_and_a_failed_save_leaves_nothing(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    train_alone("Trainer", "llama", tmp_path / "alone", save_strategy="steps", save_steps=3)
    for messages in ranks(2).run(refuse, tmp_path):
        assert "LlamaForCausalLM is not on a grid: pass stretto.parallelize" in messages["not on a grid"]
        assert "does not support fp16" in messages["fp16"]
        assert "from this rank's rows alone" in messages["own loss"]
        assert "from this rank's rows alone" in messages["smoothed"]
        assert "optimizer state of a Trainer without trainer_plugin" in messages["a stock checkpoint"]
        assert "no space left" in messages["a failed save"]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["checkpoint-3", "checkpoint-5"]


def test_other_versions_and_other_trainers_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"transformers.Trainer or a subclass of it, but was given <class 'dict'>"):
        trainer_plugin(dict)
    with pytest.raises(ValueError, match="supports SFTTrainer of trl, but not DPOTrainer"):
        trainer_plugin(trl.DPOTrainer)
    with pytest.raises(ValueError, match="OwnLoss overrides SFTTrainer's compute_loss"):
        trainer_plugin(own_loss(trl.SFTTrainer))
    for package, base in (
        ("transformers", transformers.Trainer),
        ("accelerate", transformers.Trainer),
        ("trl", trl.SFTTrainer),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(plugin.KNOWN_VERSIONS, package, ("0.3",))
            with pytest.raises(
                ValueError, match=rf"tried with {package} 0.3, .* installed: pip install '{package}==0.3"
            ):
                trainer_plugin(base)
