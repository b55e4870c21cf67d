"""Records what restic keeps of random histories: `python -m tests.retention.restic`.

Needs `go` and the Go module proxy. Writes tests/recordings/restic-0.18.0/retention.json: restic's own function for
`restic forget` runs within a copy of its module, which alone may import it.
Source: restic v0.18.0, internal/restic/snapshot_policy.go, ApplyPolicy.
"""

import json
import os
import random
import shutil
import subprocess
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

_VERSION: Final = "0.18.0"
_RECORDING: Final = Path(__file__).parents[1] / f"recordings/restic-{_VERSION}/retention.json"
_HISTORIES: Final = 200
_SEED: Final = 44

_RULES: Final = ("last", "hourly", "daily", "weekly", "monthly", "yearly")
_ZONES: Final = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Asia/Kathmandu",
    "Australia/Lord_Howe",
    "Pacific/Apia",
    "America/Sao_Paulo",
)
"""With changes of the clock by an hour and by half of one, in both hemispheres, and a day that was left out."""

_STARTS: Final = ((2011, 12, 20), (2018, 10, 20), (2024, 12, 25), (2025, 3, 25), (2025, 10, 20), (2026, 2, 20))
"""Before such changes, and before turns of years whose weeks are of the other year."""

_PAUSES: Final = (timedelta(minutes=20), timedelta(hours=1), timedelta(hours=7), timedelta(days=1), timedelta(days=9))

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


def _make_history(chance: random.Random) -> dict[str, Any]:
    """Return backups at about equal pauses, with gaps, and clocks that are set back and forth."""
    rules = chance.sample(_RULES, chance.randint(1, 4))
    moment = datetime(*chance.choice(_STARTS), chance.randrange(24), tzinfo=UTC)
    pause, times = chance.choice(_PAUSES), []
    for _ in range(chance.choice((1, 4, 20, 40))):
        times.append(int(moment.timestamp()))
        moment += pause * chance.choice((1, 1, 1, 1, 0.5, 0))
        if chance.random() < 0.1:
            moment += pause * chance.randint(2, 60)
        if chance.random() < 0.05:
            moment += timedelta(hours=chance.choice((-30, -1, 1, 30)))
    return {
        "zone": chance.choice(_ZONES),
        "policy": {rule: chance.choice((1, 2, 3, 7, 24)) for rule in sorted(rules)},
        "times": times,
    }


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
    chance = random.Random(_SEED)
    histories = [_make_history(chance) for _ in range(_HISTORIES)]
    with tempfile.TemporaryDirectory() as folder:
        answers = _ask_restic(histories, Path(folder))
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in answers)
    _RECORDING.parent.mkdir(exist_ok=True)
    _RECORDING.write_text(
        f'{{"restic":"{_VERSION}","by":"python -m tests.retention.restic","histories":[\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    main()
