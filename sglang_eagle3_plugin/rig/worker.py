"""What runs with a release's own Python: one `sglang.Engine`, a few prompts, the results as JSON. Not imported by the package.

usage: worker.py REQUEST.json RESULT.json. The request: ``engine`` (arguments of `sglang.Engine`), ``prompts`` (token ids),
``images`` (a file a prompt, or none), ``sampling_params``, ``return_hidden_states``, ``rewired_ids``, ``records`` (the plugin's
runtime directory).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(request_path: str, result_path: str) -> None:
    """Run the request and write the result; an engine that dies takes this process with it and writes none."""
    import sglang

    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    engine = sglang.Engine(**request["engine"])
    extra: dict[str, object] = {"return_hidden_states": True} if request["return_hidden_states"] else {}
    if request.get("images"):
        extra["image_data"] = [[path] for path in request["images"]]
    outputs = engine.generate(input_ids=request["prompts"], sampling_params=request["sampling_params"], **extra)
    if request["rewired_ids"] is not None:
        Path(os.environ["EAGLE3_RIG_REWIRE"]).write_text(json.dumps(request["rewired_ids"]), encoding="utf-8")
        outputs += engine.generate(input_ids=request["prompts"], sampling_params=request["sampling_params"])
    # The records of the plugin are read now: they live as long as their processes.
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(request["records"]).glob("[0-9]*.json"))]
    written = Path(result_path + ".tmp")
    written.write_text(json.dumps({"outputs": outputs, "records": records}), encoding="utf-8")
    written.replace(result_path)
    engine.shutdown()
    os._exit(0)  # nothing is left to do, and the interpreter's own way out takes seconds


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
