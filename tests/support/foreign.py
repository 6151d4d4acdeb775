"""Models that others have written, tiny and of random weights, in trainings that change plans: for tests.

Transformers and peft are imported where a model is made, since that takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.support.retraining import Retraining

__all__ = ["FOREIGN", "ForeignTraining", "llama"]

_SIZES: Mapping[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


def llama(**options: Any) -> Any:
    """A causal language model: grouped attention, rotary embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given = {"num_hidden_layers": 3, "use_cache": False, **options}
    return LlamaForCausalLM(LlamaConfig(**_SIZES, **given))


def mixtral() -> Any:
    """The same with a mixture of experts: parameters of three dimensions, and a loss of their routers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**_SIZES, **experts, num_hidden_layers=2, use_cache=False))


def resnet() -> Any:
    """Convolutions, and batch norms whose buffers DDP shares and fully_shard does not."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [2, 2]}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_channels=3, layer_type="basic", num_labels=5))


def lora() -> Any:
    """Adapters, which alone are trained, within a frozen language model."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))


FOREIGN: Mapping[str, Callable[[], Any]] = {"llama": llama, "mixtral": mixtral, "resnet": resnet, "lora": lora}


class ForeignTraining(Retraining):
    """One rank's training of such a model, by the loss that it gives itself."""

    def micro_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        trainer = self.trainer
        with trainer.step():
            loss = self.model(**self.batch(inputs, targets)).loss
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the model is called with."""
        if any(isinstance(part, nn.Conv2d) for part in self.model.modules()):
            images = inputs.repeat(1, 32).view(len(inputs), 3, 8, 8)
            return {"pixel_values": images.to(next(self.model.parameters()).dtype), "labels": targets}
        tokens = (inputs * 7).long().remainder(_SIZES["vocab_size"])
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
