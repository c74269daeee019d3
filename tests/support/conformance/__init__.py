"""Comparing a job that runs alone with the same job under ``zerotop run --headless``.

An ``Experiment`` observes behaviours of a job in a ``Place``; it is made once in each of the two places, and the
observations become rows of ``docs/conformance.md``.
"""
