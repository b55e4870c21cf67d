"""`python -m tools.vendor FOLDER`: copy what the pages of `nodeagent ui` use of other projects into the package.

FOLDER is what `tools/npm.sh pages` printed. Each file stays as its project published it; `manifest.json` has its
version, license and hash.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Final

VENDOR: Final = Path(__file__).parents[1] / "client" / "ui" / "static" / "vendor"
MANIFEST: Final = VENDOR / "manifest.json"

_PACKAGES: Final = {
    "htmx.org": ("0BSD", {"dist/htmx.min.js": "htmx.min.js", "dist/ext/hx-sse.min.js": "hx-sse.min.js"}),
    "uplot": ("MIT", {"dist/uPlot.iife.min.js": "uplot.min.js", "dist/uPlot.min.css": "uplot.min.css"}),
    "@picocss/pico": ("MIT", {"css/pico.classless.min.css": "pico.classless.min.css"}),
}
"""Of each package its license, and the files with the names that they get."""

_LICENSES: Final = ("LICENSE", "LICENSE.md")


def main() -> int:
    """Copy the files, and write the manifest."""
    modules = Path(sys.argv[1]) / "node_modules"
    shutil.rmtree(VENDOR, ignore_errors=True)
    VENDOR.mkdir(parents=True)
    listed = []
    for package, (license_name, names) in _PACKAGES.items():
        source = modules / package
        license_file = next(source / name for name in _LICENSES if (source / name).exists())
        copied = {license_file: f"{package.rpartition('/')[2]}.LICENSE"}
        copied |= {source / path: name for path, name in names.items()}
        for path, name in copied.items():
            shutil.copyfile(path, VENDOR / name)
        listed.append(
            {
                "package": package,
                "version": json.loads((source / "package.json").read_text(encoding="utf-8"))["version"],
                "license": license_name,
                "files": {
                    name: hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() for name in sorted(copied.values())
                },
            }
        )
    MANIFEST.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
