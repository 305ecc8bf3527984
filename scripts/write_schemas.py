"""Writes the JSON Schemas of the spec and the manifest into `configs/`, for editors and for whoever reads manifests.

python scripts/write_schemas.py
"""

from __future__ import annotations

import json
from pathlib import Path

from trtforge.release.manifest import manifest_schema
from trtforge.spec.load import schema_text

CONFIGS = Path(__file__).parents[1] / "configs"


def schemas() -> dict[str, str]:
    """File name in `configs/` -> its text."""
    return {
        "spec.schema.json": schema_text(),
        "manifest.schema.json": json.dumps(manifest_schema(), indent=2) + "\n",
    }


def main() -> None:
    """Writes every schema and names it."""
    for name, text in schemas().items():
        (CONFIGS / name).write_text(text, encoding="utf-8")
        print(CONFIGS / name)


if __name__ == "__main__":
    main()
