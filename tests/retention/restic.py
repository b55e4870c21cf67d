"""Asks restic again what it keeps of the histories in its recording: `python -m tests.retention.restic`.

Needs `go` and the Go module proxy. Writes tests/recordings/restic-0.18.0/retention.json, whose histories are random
ones: backups at about equal pauses, with gaps, and clocks that are set back and forth, in zones and at times where
clocks and years change. restic's own function for `restic forget` runs within a copy of its module, which alone may
import it.
Source: restic v0.18.0, internal/restic/snapshot_policy.go, ApplyPolicy.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

_VERSION: Final = "0.18.0"
_RECORDING: Final = Path(__file__).parents[1] / f"recordings/restic-{_VERSION}/retention.json"

_PROGRAM: Final = """
package main

import (
	"encoding/json"
	"os"
	"strings"
	"time"

	"github.com/restic/restic/internal/restic"
)

type history struct {
	Zone   string         `json:"zone"`
	Policy map[string]int `json:"policy"`
	Times  []int64        `json:"times"`
	Kept   []string       `json:"kept"`
}

func main() {
	var all []history
	if err := json.NewDecoder(os.Stdin).Decode(&all); err != nil {
		panic(err)
	}
	for i := range all {
		h := &all[i]
		zone, err := time.LoadLocation(h.Zone)
		if err != nil {
			panic(err)
		}
		p := h.Policy
		policy := restic.ExpirePolicy{
			Last: p["last"], Hourly: p["hourly"], Daily: p["daily"],
			Weekly: p["weekly"], Monthly: p["monthly"], Yearly: p["yearly"],
		}
		var list restic.Snapshots
		places := map[*restic.Snapshot]int{}
		for n, seconds := range h.Times {
			// As it is stored: with the offset of that time.
			text := time.Unix(seconds, 0).In(zone).Format(time.RFC3339)
			stored, err := time.Parse(time.RFC3339, text)
			if err != nil {
				panic(err)
			}
			snapshot := &restic.Snapshot{Time: stored}
			places[snapshot] = n
			list = append(list, snapshot)
		}
		h.Kept = make([]string, len(list))
		_, _, reasons := restic.ApplyPolicy(list, policy)
		for _, reason := range reasons {
			var words []string
			for _, match := range reason.Matches {
				words = append(words, strings.TrimSuffix(match, " snapshot"))
			}
			h.Kept[places[reason.Snapshot]] = strings.Join(words, ",")
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(all); err != nil {
		panic(err)
	}
}
"""


def _ask_restic(histories: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the histories with what restic keeps of each, and why."""
    module = ["go", "mod", "download", "-json", f"github.com/restic/restic@v{_VERSION}"]
    found = json.loads(subprocess.run(module, check=True, capture_output=True, cwd=folder).stdout)
    shutil.copytree(found["Dir"], folder / "restic", copy_function=shutil.copyfile)
    (folder / "restic").chmod(0o755)
    (folder / "restic/cmd").chmod(0o755)
    program = folder / "restic/cmd/ask"
    program.mkdir()
    (program / "main.go").write_text(_PROGRAM)
    answer = subprocess.run(
        ["go", "run", "./cmd/ask"],
        check=True,
        stdout=subprocess.PIPE,
        input=json.dumps(histories).encode(),
        cwd=folder / "restic",
        env=os.environ | {"GOFLAGS": "-mod=mod"},
    )
    return [dict(one) for one in json.loads(answer.stdout)]


def main() -> None:
    """Write the recording, one history a line."""
    with tempfile.TemporaryDirectory() as folder:
        answers = _ask_restic(json.loads(_RECORDING.read_text())["histories"], Path(folder))
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in answers)
    _RECORDING.write_text(
        f'{{"restic":"{_VERSION}","by":"python -m tests.retention.restic","histories":[\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    main()
