"""Small model in the Trainer of torchtitan, on CPU: two batches are accumulated for each step.

torchtitan asks for an accelerator, so torch's CPU is given to it as one; its own models need more
of one (FlexAttention has no backward on CPU). The data is random.
"""

# The frameworks are not installed where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed

torch._utils._get_available_device_type = lambda: "cpu"  # read when torchtitan is imported
for name in ("reset_peak_memory_stats", "empty_cache"):
    setattr(torch.cpu, name, lambda: None)
torch.cpu.get_device_name = lambda device: "CPU"
torch.cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=1 << 30)
torch.cpu.memory_stats = lambda device: {}
torch.cpu.current_device = lambda: 0
torch.distributed.set_timeout = lambda timeout, group: None  # a later torch has it

from step_journal import StepJournal  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CommConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import rankdump  # noqa: E402

STEPS, LENGTH, VOCABULARY = 3, 16, 64


class RandomLoader(BaseDataLoader):
    """Endless random tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, **about: Any) -> None:
        self._source = torch.Generator().manual_seed(7 + about["dp_rank"])
        self._shape = (about["local_batch_size"], LENGTH)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = torch.randint(VOCABULARY, self._shape, generator=self._source)
            yield {"input": tokens}, tokens.roll(-1, 1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class TokenNet(BaseModel):
    """Two layers over one-hot tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        def update_from_config(self, *, config: Any, **about: Any) -> None:
            pass

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            return sum(each.numel() for each in model.parameters()), 1

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first = Linear(Linear.Config(in_features=VOCABULARY, out_features=16))
        self.last = Linear(Linear.Config(in_features=16, out_features=VOCABULARY))

    def forward(self, tokens: torch.Tensor, **about: Any) -> torch.Tensor:
        hidden = self.first(torch.nn.functional.one_hot(tokens, VOCABULARY).float())
        return self.last(torch.tanh(hidden))

    def init_weights(self, **about: Any) -> None:
        torch.manual_seed(0)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.1)


class NoTokenizer(BaseTokenizer):
    """Tokens come as numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **about: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def main() -> None:
    spec = ModelSpec(
        name="token_net",
        flavor="tiny",
        model=TokenNet.Config(),
        parallelize_fn=lambda model, **about: model,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    config = Trainer.Config(
        dump_folder=sys.argv[1],
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomLoader.Config(),
        optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=4,
            seq_len=LENGTH,
            steps=STEPS,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        comm=CommConfig(),
    )
    trainer = config.build()
    rankdump.integrations.torchtitan.attach(trainer)
    journal = StepJournal()
    (model,) = trainer.model_parts
    (optimizer,) = trainer.optimizers.optimizers
    optimizer.register_step_pre_hook(lambda *_: journal.add_gradients(model))
    optimizer.register_step_post_hook(lambda *_: journal.add_parameters(model))
    trainer.train()
    trainer.close()
    journal.close(steps=trainer.step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
