"""The coordinator's process as the front end's master sees it: started, and started again."""

from __future__ import annotations

import logging
import os
import subprocess
import threading

import msgspec

from megatron_hybrid.server.link.parent import start_process
from megatron_hybrid.server.link.run_folder import RunFolder
from megatron_hybrid.server.options import FrontEndSettings, ServerOptions

logger = logging.getLogger(__name__)

COORDINATOR = "coordinator"  # the name of its socket
COMMAND = ("-m", "megatron_hybrid.server.replicas.coordinator")  # for the Python interpreter
RESTART_SECONDS = 0.5  # one that fails at once shall not keep a core busy
END_SECONDS = 2.0


class CoordinatorProcess:
    """Runs until `end`. While it is gone, workers place requests by themselves."""

    def __init__(self, options: ServerOptions, folder: RunFolder) -> None:
        self._settings = msgspec.json.encode(FrontEndSettings(options, str(folder.path), ""))
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="coordinator", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the process, and start no other."""
        self._ending.set()
        self._thread.join()

    def _keep(self) -> None:
        command = (*COMMAND, str(os.getpid()))
        process = start_process(command, self._settings)
        while not self._ending.wait(RESTART_SECONDS):
            if process.poll() is not None:
                logger.warning("The coordinator has ended, and is started again.")
                process = start_process(command, self._settings)
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
