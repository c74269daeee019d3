"""Takes the picture of a job on four nodes anew: DeepSpeed by pdsh in network namespaces, seen live on the first of them.

Only for root, with the programs that tests/real/test_run_on_nodes.py needs.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests"), *(str(HERE.parent / "tests" / name) for name in ("support", "real"))]

import test_run_on_nodes as on_nodes  # type: ignore[import-not-found]
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.live_recording import RunningRecording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.drawing.glyphs import BLOCKS


async def take_picture(recording: Path) -> None:
    app = ZerotopApp(RecordingSource(RunningRecording.open(recording)), glyphs=BLOCKS, title="four-nodes")
    async with app.run_test(size=(120, 28)) as pilot:
        await pilot.pause(6)
        (HERE / "nodes.svg").write_text(app.export_screenshot(title=""))


def main() -> None:
    with tempfile.TemporaryDirectory() as name, on_nodes.start_nodes(Path(name), 4, is_shared=False) as job:
        shutil.copy(on_nodes.LOOP, Path(name, "train.py"))
        job.environment |= {"PATH": f"{on_nodes.BIN}:{job.environment['PATH']}", "PYTHONWARNINGS": "ignore"}
        with Path(name, ".deepspeed_env").open("a") as file:
            file.write("TORCH_CPP_LOG_LEVEL=ERROR\n")
        command = ("deepspeed", "--hostfile", "hostfile", "train.py", "--steps", "100000")
        process = job.run(*command, options=("--recording", str(job.recording)))
        on_nodes.wait_for(lambda: all(len(job.read_steps(rank)) > 150 for rank in range(4)))
        asyncio.run(take_picture(job.recording))
        job.cluster.nodes[0].run_command("pkill", "-INT", "-o", "-f", "run --headless")
        process.wait(60)


if __name__ == "__main__":
    main()
