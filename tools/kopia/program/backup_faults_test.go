package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/pkg/errors"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/snapshotfs"
	"github.com/kopia/kopia/snapshot/upload"
)

// faulty is a repository whose first session, or last flush, seems to fail.
type faulty struct {
	repo.Repository

	session, flush error
}

func (f *faulty) NewWriter(ctx context.Context, options repo.WriteSessionOptions) (context.Context, repo.RepositoryWriter, error) {
	if err := f.session; err != nil {
		f.session = nil

		return nil, nil, err
	}

	ctx, w, err := f.Repository.NewWriter(ctx, options)

	return ctx, &faultyWriter{w.(repo.DirectRepositoryWriter), f.flush}, err //nolint:forcetypeassert // tests
}

type faultyWriter struct {
	repo.DirectRepositoryWriter

	fault error
}

func (f *faultyWriter) Flush(ctx context.Context) error {
	if err := f.DirectRepositoryWriter.Flush(ctx); err != nil {
		return err
	}

	return f.fault
}

func TestIncompleteSnapshotsThatCannotBeDeletedFailNoBackup(t *testing.T) {
	b := newBench(t)
	checkpoint := b.saveCheckpoint(b.backUp(decision{}).result.Snapshot)
	b.rep = &faulty{Repository: b.rep, session: errors.New("no session")}

	if made := b.backUp(decision{Delete: []manifest.ID{checkpoint.ID}}).result; !strings.HasSuffix(made.DeleteFault, "no session") {
		t.Errorf("the result is %+v", made)
	}
}

func TestCompleteSnapshotThatMayBeStoredIsNamed(t *testing.T) {
	b, ctx := newBench(t), context.Background()
	rep := &faulty{Repository: b.rep, flush: errors.New("no answer")}
	from, _ := b.device(zeroBlock)

	for name, work := range map[string]func(*report) error{
		"files": func(report *report) error {
			decided := strings.NewReader(`{"path": "` + b.volume + `", "checkpoint_seconds": 600}`)

			return backUp(ctx, rep, testSource, nil, decided, report)
		},
		"blocks": func(report *report) error {
			return backUpDevice(ctx, rep, blockSource, from, strings.NewReader("{}"), report)
		},
	} {
		out := &bytes.Buffer{}

		err := work(newReport(out, &bytes.Buffer{}))
		if made := parse(t, out).result; err == nil || made == nil || made.Snapshot.ID == "" {
			t.Errorf("%v: %v, the result is %+v", name, err, made)
		}
	}
}

func TestWhatACheckpointNamesAndTheRepositoryLacksIsRead(t *testing.T) {
	b, ctx := newBench(t), context.Background()
	first := b.backUp(decision{}).result.Snapshot
	lacking, directory := *first, &snapshot.DirManifest{}
	must(t, readJSON(ctx, b.rep, first.RootObjectID(), directory))

	for _, one := range directory.Entries {
		if one.Name == "one" {
			one.ObjectID, _ = object.ParseID("0123456789abcdef0123456789abcdef")
		}
	}

	must(t, repo.WriteSession(ctx, b.rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) (err error) {
		root := *first.RootEntry
		root.ObjectID, err = snapshotfs.WriteDirManifest(ctx, w, "", directory, metadataCompressor)
		lacking.RootEntry = &root

		return err
	}))
	must(t, b.rep.Refresh(ctx))

	second := b.backUp(after(t, b.saveCheckpoint(&lacking)))

	if second.last.HashedBytes != int64(len("first")) || second.last.CachedBytes != int64(len("second")) {
		t.Errorf("the progress is %+v", second.last)
	}

	if second.result.Snapshot.RootObjectID() != first.RootObjectID() {
		t.Errorf("the snapshot is %+v", second.result.Snapshot)
	}
}

// signaled is an output whose process gets a signal while the result is written.
type signaled struct{ bytes.Buffer }

func (s *signaled) Write(text []byte) (int, error) {
	if bytes.HasPrefix(text, []byte(`{"result"`)) {
		if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
			return 0, err
		}
	}

	return s.Buffer.Write(text)
}

func TestSignalAfterAllIsReadEndsNothing(t *testing.T) {
	b, out := newBench(t), &signaled{}
	decided := strings.NewReader(`{"path": "` + b.volume + `", "checkpoint_seconds": 600}`)
	must(t, backUp(context.Background(), b.rep, testSource, nil, decided, newReport(out, &bytes.Buffer{})))

	if made := parse(t, &out.Buffer).result.Snapshot; made.IncompleteReason != "" {
		t.Errorf("the snapshot is %+v", made)
	}
}

// acting does something to a volume once kopia has listed an entry, and has not opened it, or has read a file.
type acting struct {
	upload.NullUploadProgress

	before, after func(path string)
}

func (a *acting) StartedDirectory(path string) { a.before(path) }

func (a *acting) HashingFile(path string) { a.before(path) }

func (a *acting) FinishedFile(path string, _ error) { a.after(path) }

// upload uploads the volume while something is done to it, and returns what is found there, and the report.
func (b *bench) upload(doing *acting) (*snapshot.Manifest, *report) {
	b.Helper()

	report := newReport(&bytes.Buffer{}, &bytes.Buffer{})
	report.Progress = doing

	ctx, w, err := b.rep.NewWriter(context.Background(), repo.WriteSessionOptions{})
	must(b.T, err)

	decided := &decision{Path: b.volume, Parallel: 1, CheckpointSeconds: 600}
	tree, err := buildTree(ctx, w, testSource, &exclusions{})
	must(b.T, err)

	made, _, err := uploadVolume(ctx, w, testSource, nil, decided, tree, report)
	must(b.T, err)

	return made, report
}

func TestWhatIsDeletedBeforeItIsReadIsLeftOutAndWhatCannotBeReadIsAnError(t *testing.T) {
	b := newBench(t)
	b.write("gone", "third")
	b.write("below/gone", "fourth")
	must(t, os.MkdirAll(filepath.Join(b.volume, "gone directory", "inner"), 0o700))

	for _, broken := range []bool{false, true} {
		made, report := b.upload(&acting{before: func(path string) {
			if strings.Contains(path, "gone") {
				must(t, os.RemoveAll(filepath.Join(b.volume, path)))
			} else if broken && path == "one" {
				must(t, os.Remove(filepath.Join(b.volume, path)))
				must(t, os.Symlink("nowhere", filepath.Join(b.volume, path)))
			}
		}, after: func(string) {}})

		summary := made.RootEntry.DirSummary
		if broken && (summary.FatalErrorCount != 1 || len(summary.FailedEntries) != 1 || summary.FailedEntries[0].EntryPath != "one") {
			t.Errorf("%v errors, %+v", summary.FatalErrorCount, summary.FailedEntries)
		}

		if len(report.goneDirectories) != 1 && !broken {
			t.Errorf("%v are gone", report.goneDirectories)
		}

		if !broken && (summary.FatalErrorCount != 0 || len(summary.FailedEntries) != 0 || summary.TotalFileCount != 2 || summary.TotalDirCount != 2 || made.IncompleteReason != "") {
			t.Errorf("%+v, %v", summary, made.IncompleteReason)
		}

		b.write("gone", "third")
	}
}

func TestDirectoryThatIsMovedWhileItIsReadIsCounted(t *testing.T) {
	nothing := func(string) {}

	for name, one := range map[string]struct {
		replaced, early bool
		files           int64
	}{
		"once a file is read":         {files: 1},
		"before a file is opened":     {early: true},
		"and replaced by another one": {replaced: true, files: 1},
	} {
		b := newBench(t)
		below := filepath.Join(b.volume, "below")
		b.write("below/three", "third")
		must(t, os.Remove(filepath.Join(b.volume, "one")))

		move := func(path string) {
			if filepath.Dir(path) == "below" && os.Rename(below, filepath.Join(b.T.TempDir(), "moved")) == nil && one.replaced {
				must(t, os.Mkdir(below, 0o700))
			}
		}

		doing := &acting{before: nothing, after: move}
		if one.early {
			doing = &acting{before: move, after: nothing}
		}

		made, report := b.upload(doing)
		if summary := made.RootEntry.DirSummary; len(report.goneDirectories) != 1 || summary.TotalFileCount != one.files || summary.FatalErrorCount != 0 {
			t.Errorf("%v: %v are gone, %+v", name, report.goneDirectories, summary)
		}
	}
}
