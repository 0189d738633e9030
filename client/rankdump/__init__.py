"""rankdump: what every operator of every rank read and wrote, collected outside training.

>>> import rankdump
>>> session = rankdump.attach(model)          # doctest: +SKIP
>>> for step, batch in enumerate(loader):     # doctest: +SKIP
...     session.step(step)
...     train(batch)
"""
