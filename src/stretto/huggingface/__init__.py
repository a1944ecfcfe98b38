# SPDX-License-Identifier: Apache-2.0
"""All that Stretto knows of Hugging Face's libraries; none of them is imported before it is used.

Data, read without torch:
    families, family_roles   the table of transformers' families: their blocks, and roles that Stretto has for them
    public_models            public models by name
    config_json              sizes of a model from its config.json
    refusals                 configurations that `parallelize` does not take
Models on a grid, used by `stretto.parallel` and `stretto.train`:
    pretrained_model         recognizes transformers' models, and adapts their methods to sharded parameters
    roles                    roles of a model: its family's, or those of its tensor-parallel plan
    formulas                 what a norm, an embedding, a loss or experts compute, found by running them
    loss, router_loss        the losses that models compute, over the global batch
    folder                   folders as `save_pretrained` writes them: configuration, weights and tokenizer
    weight_names             names of tensors in files
Loops, above `stretto.train`:
    trainer, accelerator, optimizer_state    `trainer_plugin` and `follow_grid`
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.huggingface.accelerator import follow_grid
    from stretto.huggingface.trainer import trainer_plugin

__all__ = ["follow_grid", "trainer_plugin"]

__getattr__, __dir__ = attach(__name__)
