"""`python -m megatron_hybrid.dynamo MODEL`: a worker of NVIDIA Dynamo."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.log_format import LOG_FORMATS, set_up_logging

MISSING = (
    "Dynamo is not installed: `pip install 'megatron-hybrid[dynamo]'`, or on a machine without a "
    "GPU `pip install --no-deps -r configs/dynamo/requirements.txt`."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; the process's exit code."""
    if find_spec("dynamo") is None or find_spec("dynamo._core") is None:
        print(MISSING, file=sys.stderr)
        return 2
    import uvloop
    from dynamo.common.backend.worker import Worker
    from dynamo.llm.exceptions import DynamoException

    from megatron_hybrid.dynamo.arguments import parse
    from megatron_hybrid.dynamo.engine import MegatronEngine

    set_up_logging(LOG_FORMATS[0], "worker", "%(asctime)s %(name)s: ", logging.WARNING)
    logging.getLogger("megatron_hybrid").setLevel(logging.INFO)
    try:
        settings = parse(argv)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    engine, config = MegatronEngine.with_config(settings)

    async def run() -> None:
        await Worker(engine, config).run()

    try:
        uvloop.run(run())
    except (DynamoException, ConfigurationError) as error:
        print(error, file=sys.stderr)
        return engine.exit_code or 1
    return engine.exit_code


if __name__ == "__main__":
    sys.exit(main())
