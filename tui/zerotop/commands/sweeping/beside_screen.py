"""Running points in a thread beside their screen."""

from __future__ import annotations

import threading

from zerotop.commands.common.model_config import find_shape
from zerotop.commands.common.user_settings import load_settings
from zerotop.commands.sweeping.point_runner import PointRunner
from zerotop.ui.app.sweep_app import SweepApp
from zerotop.ui.sweep.model import SearchProgress, SweepModel, SweepProgress


def run_beside_screen(runner: PointRunner, progress: SweepProgress, search: SearchProgress | None = None) -> None:
    """Run until everything is measured and the screen is left; leaving it earlier stops the jobs.

    ``progress`` and ``search`` are the runner as the screen knows it.
    """
    thread = threading.Thread(target=runner.run, name="sweep")
    thread.start()
    try:
        SweepApp(SweepModel(progress, find_shape(runner.sweep.plan.model), search), settings=load_settings()).run()
    finally:
        runner.stop()
        thread.join()
