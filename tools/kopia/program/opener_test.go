package main

import (
	"context"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/kopia/kopia/internal/crypto"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/blob/filesystem"
)

func TestOpeningLeavesNoMemoryOfTheKeyDerivation(t *testing.T) {
	ctx, folder, parser := context.Background(), t.TempDir(), newApplication()
	st, err := filesystem.New(ctx, &filesystem.Options{Path: folder}, true)
	must(t, err)

	config := filepath.Join(t.TempDir(), "config")
	must(t, repo.Initialize(ctx, st, &repo.NewRepositoryOptions{FormatBlockKeyDerivationAlgorithm: crypto.ScryptAlgorithm}, "password"))
	must(t, repo.Connect(ctx, config, st, "password", &repo.ConnectOptions{}))
	must(t, parser.GetFlag("config-file").Model().Value.Set(config))
	must(t, parser.GetFlag("password").Model().Value.Set("password"))

	debug.FreeOSMemory()

	before := keptMiB()
	rep, err := opener{parser}.open(ctx)
	must(t, err)
	defer rep.Close(ctx) //nolint:errcheck // nothing was written

	if added := keptMiB() - before; added > 32 {
		t.Fatalf("%d MiB more of the heap stay in memory", added)
	}
}

// keptMiB returns how much of the heap is not given back to the system.
func keptMiB() int {
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)

	return int(memory.HeapSys-memory.HeapReleased) >> 20
}
