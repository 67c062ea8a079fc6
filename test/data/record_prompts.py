# SPDX-License-Identifier: Apache-2.0
"""Record prompts by transformers: `python test/data/record_prompts.py`.

Writes chat_templates/prompts/*.json beside this file. Needs transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from fixtures.conversations import (
    TEMPLATES,
    TEXT_TEMPLATES,
    VISION_TEMPLATES,
    recorded_cases,
    recorded_file,
)
from fixtures.reference_prompts import reference_prompt


def main() -> None:
    """Write one file per template, with the lines of each prompt."""
    for template in (*TEXT_TEMPLATES, *VISION_TEMPLATES):
        source = (TEMPLATES / f"{template}.jinja").read_text()
        prompts = {
            name: reference_prompt(source, *case).splitlines(keepends=True)
            for name, case in recorded_cases(template).items()
        }
        recorded_file(template).parent.mkdir(exist_ok=True)
        recorded_file(template).write_text(json.dumps(prompts, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
