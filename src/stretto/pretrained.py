"""What `parallelize` takes of Hugging Face's models: rules that it applies to models, and the planner to config.json.

Plain data and no imports of torch or transformers: whether a model can be trained is asked before it is there.
"""

from collections.abc import Mapping
from typing import Any

# The styles of a tensor-parallel plan, and the roles that they are.
STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "head_norm",
}
# Linears whose output or input every rank wants whole, and what they are where x and y are 1, so that it is.
WHOLE = {"colwise_gather_output": "colwise", "colwise_rep": "colwise", "rowwise_split_input": "rowwise"}
# The one head that needs no word from the user.
LANGUAGE_MODEL_HEAD = "lm_head"


def refusal_of_style(owner: str, prefix: str, tp_plan: Mapping[str, str]) -> str | None:
    """Why the tensor-parallel plan of the class `owner` is not taken, and what to do; None if all styles are known.

    prefix: of the patterns' names within the whole model, with a dot.
    """
    for pattern, style in tp_plan.items():
        if style not in STYLES:
            return (
                f"the tensor-parallel plan of {owner} gives {prefix + pattern!r} the style {style!r}; "
                f"Stretto knows {', '.join(STYLES)}" + _advice(prefix, tp_plan)
            )
    return None


def _advice(prefix: str, tp_plan: Mapping[str, str]) -> str:
    """The roles that linears of unknown styles have where nothing cuts features; nothing if Stretto cannot say."""
    roles = {prefix + pattern: WHOLE[style] for pattern, style in tp_plan.items() if style in WHOLE}
    if any(style not in STYLES and style not in WHOLE for style in tp_plan.values()):
        return ""
    return f". On a grid of x=1, y=1, where every rank has whole features, they are roles={roles}"


def refusal_of_attention_dropout(options: Mapping[str, Any]) -> str | None:
    """Why a configuration whose attention drops weights is not taken; None if it drops none."""
    for option, value in options.items():
        if "att" in option and "drop" in option and isinstance(value, float) and value > 0:
            return (
                f"config.{option} is {value}: attention draws its dropout inside the kernel, where ranks that share a "
                f"head would draw differently. Set {option}=0.0"
            )
    return None
