package main

import (
	"context"
	"path/filepath"
	"runtime"
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

	rep, err := opener{parser}.open(ctx)
	must(t, err)
	defer rep.Close(ctx) //nolint:errcheck // nothing was written

	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)

	if kept := memory.HeapSys - memory.HeapReleased; kept > 48<<20 {
		t.Fatalf("%d MiB of the heap stay in memory", kept>>20)
	}
}
