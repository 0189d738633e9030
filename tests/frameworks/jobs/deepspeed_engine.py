"""Loop with an engine of DeepSpeed: accumulation over two batches, an evaluation in between."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from step_journal import StepJournal, cut_batches, make_net
from torch import nn

import rankdump

ACCUMULATED = 2


def main() -> None:
    deepspeed.ops.__compatible_ops__.clear()  # none of its operators is compiled
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATED,
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, config=settings, dist_init_required=False
    )
    session = rankdump.integrations.deepspeed.attach(engine)
    journal = StepJournal()
    optimizer.register_step_pre_hook(lambda *_: journal.add_gradients(net))
    optimizer.register_step_post_hook(lambda *_: journal.add_parameters(net))
    training, evaluation = cut_batches((6, 1))
    for number, (x, target) in enumerate(training):
        loss = nn.functional.cross_entropy(engine(x), target)
        engine.backward(loss)
        journal.add_loss(loss)
        engine.step()
        if number == 1:
            engine.eval()
            with torch.no_grad():
                x, target = evaluation[0]
                journal.add_loss(nn.functional.cross_entropy(engine(x), target))
            engine.train()
    session.close()
    journal.close(steps=engine.global_steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
