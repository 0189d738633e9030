"""rankdump: what every operator of every rank read and wrote, collected outside training.

A training script needs two lines. The plan comes from the file that RANKDUMP_CONFIG, else
MINDSPORE_DUMP_CONFIG, names; without one, both lines cost nothing.

    session = rankdump.attach(model)
    for i, batch in enumerate(batches):
        session.step(i)
"""

from rankdump.session import Session, attach

__all__ = ["Session", "attach"]
