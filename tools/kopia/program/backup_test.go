package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/blob/filesystem"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/policy"
	"github.com/kopia/kopia/snapshot/snapshotfs"
)

const changesTag = "example/changes"

var testSource = snapshot.SourceInfo{Host: "default", UserName: "default", Path: "snapshot-data-upload-download/kopia/app/data"}

// bench is a repository and a volume.
type bench struct {
	*testing.T

	rep    repo.Repository
	config string
	volume string
}

// said is what one backup has written.
type said struct {
	offer  *offer
	last   *progress
	result *result
}

func newBench(t *testing.T) *bench {
	t.Helper()

	ctx, folder := context.Background(), t.TempDir()
	store, config, volume := filepath.Join(folder, "store"), filepath.Join(folder, "config"), filepath.Join(folder, "volume")

	for _, path := range []string{store, filepath.Join(volume, "below")} {
		must(t, os.MkdirAll(path, 0o700))
	}

	st, err := filesystem.New(ctx, &filesystem.Options{Path: store}, true)
	must(t, err)
	must(t, repo.Initialize(ctx, st, nil, "password"))

	options := repo.ConnectOptions{ClientOptions: repo.ClientOptions{Hostname: "default", Username: "default"}}
	must(t, repo.Connect(ctx, config, st, "password", &options))

	b := &bench{T: t, config: config, volume: volume}
	b.reopen(0)
	b.write("one", "first")
	b.write("below/two", "second")

	return b
}

// reopen opens the repository as it is that much later.
func (b *bench) reopen(later time.Duration) {
	b.Helper()

	ctx, now := context.Background(), func() time.Time { return time.Now().Add(later) }
	rep, err := repo.Open(ctx, b.config, "password", &repo.Options{TimeNowFunc: now})
	must(b.T, err)
	b.Cleanup(func() { must(b.T, rep.Close(ctx)) })

	b.rep = rep
}

func must(t *testing.T, err error) {
	t.Helper()

	if err != nil {
		t.Fatal(err)
	}
}

// write writes a file whose time is an hour ago, whatever it was.
func (b *bench) write(name, content string) {
	b.Helper()

	path, past := filepath.Join(b.volume, name), time.Now().Add(-time.Hour).Truncate(time.Hour)
	must(b.T, os.WriteFile(path, []byte(content), 0o640))
	must(b.T, os.Chtimes(path, past, past))
}

// recreate puts the same files into a new volume.
func (b *bench) recreate() {
	b.Helper()

	b.volume = filepath.Join(filepath.Dir(b.volume), "copy")
	must(b.T, os.MkdirAll(filepath.Join(b.volume, "below"), 0o700))
	b.write("one", "first")
	b.write("below/two", "second")
}

// backUp backs the volume up as is decided, at least two ticks of the clock after the last change in it.
func (b *bench) backUp(decided decision) *said {
	b.Helper()

	for changed := time.Now(); time.Since(changed) < 2*clockTick; {
		time.Sleep(clockTick)
	}

	if decided.Path == "" {
		decided.Path = b.volume
	}

	decided.ChangesTag, decided.Parallel, decided.CheckpointSeconds = changesTag, 2, 600

	document, err := json.Marshal(decided)
	must(b.T, err)

	var out, messages bytes.Buffer

	report := newReport(&out, &messages)
	must(b.T, backUp(context.Background(), b.rep, testSource, nil, bytes.NewReader(document), report))
	must(b.T, b.rep.Refresh(context.Background()))

	return parse(b.T, &out)
}

func parse(t *testing.T, out *bytes.Buffer) *said {
	t.Helper()

	found := &said{}

	for lines := bufio.NewScanner(out); lines.Scan(); {
		var line struct {
			Offer    *offer    `json:"offer"`
			Progress *progress `json:"progress"`
			Result   *result   `json:"result"`
		}

		must(t, json.Unmarshal(lines.Bytes(), &line))

		switch {
		case line.Offer != nil:
			found.offer = line.Offer
		case line.Progress != nil:
			found.last = line.Progress
		default:
			found.result = line.Result
		}
	}

	return found
}

// after returns the decision to take unchanged files from these snapshots.
func after(t *testing.T, snapshots ...*snapshot.Manifest) decision {
	t.Helper()

	decided := decision{}

	for _, one := range snapshots {
		until := one.StartTime.ToTime()

		if text := one.Tags[tagPrefix+changesTag]; text != "" {
			parsed, err := time.Parse(time.RFC3339Nano, text)
			must(t, err)

			until = parsed
		}

		decided.Parents = append(decided.Parents, parent{one.ID, until})
	}

	return decided
}

// entry returns the entry of a file in a snapshot.
func (b *bench) entry(of *snapshot.Manifest, path string) *snapshot.DirEntry {
	b.Helper()

	root, err := snapshotfs.SnapshotRoot(b.rep, of)
	must(b.T, err)

	found, err := snapshotfs.GetNestedEntry(context.Background(), root, strings.Split(path, "/"))
	must(b.T, err)

	return found.(snapshot.HasDirEntry).DirEntry() //nolint:forcetypeassert
}

// saveCheckpoint saves a copy of a snapshot as an incomplete one.
func (b *bench) saveCheckpoint(of *snapshot.Manifest) *snapshot.Manifest {
	b.Helper()

	copied := *of
	copied.IncompleteReason, copied.Tags = "checkpoint", nil

	return b.save(copied)
}

func (b *bench) save(copied snapshot.Manifest) *snapshot.Manifest {
	b.Helper()

	ctx := context.Background()
	must(b.T, repo.WriteSession(ctx, b.rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) error {
		_, err := snapshot.SaveSnapshot(ctx, w, &copied)
		return err
	}))
	must(b.T, b.rep.Refresh(ctx))

	return &copied
}

func TestBackupIsAsDecided(t *testing.T) {
	b := newBench(t)

	made := b.backUp(decision{
		Tags: map[string]string{"a": "1"}, Pins: []string{"pin"}, Policy: &policy.Policy{NoParent: true},
	})

	stored := b.backUp(decision{}).offer
	if len(stored.Snapshots) != 1 || stored.Snapshots[0].ID != made.result.Snapshot.ID || !stored.Defined.NoParent {
		t.Fatalf("the repository has %+v", stored)
	}

	one := stored.Snapshots[0]
	if one.Tags["tag:a"] != "1" || len(one.Pins) != 1 || one.RootEntry.DirSummary.TotalFileCount != 2 || one.IncompleteReason != "" {
		t.Errorf("the snapshot is %+v", one)
	}
}

func TestExclusionsAddToThePolicyOfOneBackup(t *testing.T) {
	b := newBench(t)
	b.write("three", "much longer than the others")

	own := &policy.Policy{FilesPolicy: policy.FilesPolicy{IgnoreRules: []string{"one"}}}
	excluding := b.backUp(decision{Policy: own, Exclude: exclusions{Patterns: []string{"/below/"}, MaxBytes: 10}})
	after := b.backUp(decision{})

	if count := excluding.result.Snapshot.RootEntry.DirSummary.TotalFileCount; count != 0 {
		t.Errorf("%v files were backed up", count)
	}

	if found := after.result.Snapshot.RootEntry.DirSummary.TotalFileCount; found != 2 {
		t.Errorf("%v files were backed up afterwards", found)
	}

	if files := after.offer.Defined.FilesPolicy; len(files.IgnoreRules) != 1 || files.MaxFileSize != 0 {
		t.Errorf("the policy of the source has %+v", files)
	}
}

func TestExceptionsOfOthersDoNotConcernExclusions(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	above := &policy.Policy{FilesPolicy: policy.FilesPolicy{IgnoreRules: []string{"one"}}}
	must(t, repo.WriteSession(ctx, b.rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) error {
		return policy.SetPolicy(ctx, w, policy.GlobalPolicySourceInfo, above)
	}))
	must(t, b.rep.Refresh(ctx))

	// It inherits nothing.
	own := &policy.Policy{NoParent: true}
	if all := b.backUp(decision{Policy: own}).result.Snapshot; all.RootEntry.DirSummary.TotalFileCount != 2 {
		t.Errorf("the snapshot is %+v", all)
	}

	own.FilesPolicy.IgnoreRules = []string{"!two"}
	excluding := b.backUp(decision{Policy: own, Exclude: exclusions{Patterns: []string{"two"}}}).result.Snapshot

	if b.entry(excluding, "one"); excluding.RootEntry.DirSummary.TotalFileCount != 1 {
		t.Errorf("the snapshot is %+v", excluding)
	}
}

func TestUnchangedFilesAreNotRead(t *testing.T) {
	b := newBench(t)
	first := b.backUp(decision{}).result.Snapshot

	second := b.backUp(after(t, first))

	if second.last.HashedFiles != 0 || second.last.CachedFiles != 2 || second.last.CachedBytes != int64(len("firstsecond")) {
		t.Errorf("the progress is %+v", second.last)
	}

	if second.result.Snapshot.RootObjectID() != first.RootObjectID() || second.result.Copied {
		t.Errorf("the result is %+v", second.result)
	}
}

func TestIncompleteSnapshotsSayWhichChangesTheyHave(t *testing.T) {
	b := newBench(t)
	decided, report := []byte(`{"path": "/proc/sys/net/ipv4/route", "checkpoint_seconds": 600, "changes_tag": "`+changesTag+`"}`),
		newReport(&bytes.Buffer{}, &bytes.Buffer{})

	// It has a file that nobody can read.
	if err := backUp(context.Background(), b.rep, testSource, nil, bytes.NewReader(decided), report); err == nil {
		t.Fatal("the backup is complete")
	}

	must(t, b.rep.Refresh(context.Background()))

	left := b.backUp(decision{}).offer.Snapshots[0]
	if until := after(t, left).Parents[0].Until; left.IncompleteReason == "" || !until.Before(left.StartTime.ToTime()) {
		t.Errorf("the repository has %+v", left)
	}
}

func TestKnownFilesAreCountedWhenTheyAreTaken(t *testing.T) {
	b := newBench(t)
	first := b.backUp(decision{}).result.Snapshot
	b.write("one", "FIRST")

	second := b.backUp(after(t, first)).result.Snapshot
	decided, report := after(t, first, second), newReport(&bytes.Buffer{}, &bytes.Buffer{})

	defer report.stop()

	decided.Path = b.volume
	root, err := openVolume(&decided, nil)
	must(t, err)

	volume, _ := watchChanges(b.rep, root, &decided, []*snapshot.Manifest{first, second}, report)

	var known *knownFile

	must(t, fs.IterateEntries(context.Background(), volume, func(_ context.Context, entry fs.Entry) error {
		if found, is := entry.(*knownFile); is {
			known = found
		}

		return nil
	}))

	if known == nil || report.read().CachedFiles != 0 {
		t.Fatalf("known: %+v, the progress is %+v", known, report.read())
	}

	if _, err := known.DirEntryOrNil(context.Background()); err != nil || report.read().CachedFiles != 1 {
		t.Errorf("the progress is %+v, %v", report.read(), err)
	}
}

func TestCheckpointServesWhatWasChangedSinceTheParent(t *testing.T) {
	b := newBench(t)
	first := b.backUp(decision{}).result.Snapshot
	b.write("below/two", "SECOND")
	checkpoint := b.saveCheckpoint(b.backUp(after(t, first)).result.Snapshot)

	third := b.backUp(after(t, first, checkpoint))

	if third.last.HashedBytes != 0 || third.last.CachedBytes != int64(len("firstsecond")) {
		t.Errorf("the progress is %+v", third.last)
	}

	if third.result.Snapshot.RootObjectID() != checkpoint.RootObjectID() {
		t.Errorf("the snapshot is %+v", third.result.Snapshot)
	}
}

func TestIncompleteSnapshotsAreDeleted(t *testing.T) {
	b := newBench(t)
	checkpoint := b.saveCheckpoint(b.backUp(decision{}).result.Snapshot)

	b.backUp(decision{Delete: []manifest.ID{checkpoint.ID, "0123456789abcdef0123456789abcdef"}})

	for _, one := range b.backUp(decision{}).offer.Snapshots {
		if one.IncompleteReason != "" {
			t.Errorf("the repository has %+v", one)
		}
	}
}

func TestInvalidDecisionFails(t *testing.T) {
	b := newBench(t)

	for text, want := range map[string]string{
		"": "EOF", "{": "unexpected EOF", `{"path": "/nonexistent"}`: "no such file", `{"parents": [{"id": "x"}]}`: "parent x",
	} {
		report := newReport(&bytes.Buffer{}, &bytes.Buffer{})
		err := backUp(context.Background(), b.rep, testSource, nil, strings.NewReader(text), report)

		report.stop()

		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestSizeIsEstimatedOnceABackupLasts(t *testing.T) {
	b := newBench(t)
	root, err := openDirectory(b.volume)
	must(t, err)

	tree := policy.BuildTree(nil, policy.DefaultPolicy)

	for _, roughly := range []bool{true, false} {
		r := newReport(&bytes.Buffer{}, &bytes.Buffer{})
		r.estimateLater(context.Background(), root, tree, roughly)()

		if early := r.estimatedBytes.Load(); early != 0 {
			t.Errorf("estimated as %v at once", early)
		}

		if roughly {
			r.estimateAfter = 0
		}

		end := r.estimateLater(context.Background(), root, tree, roughly)
		if !roughly {
			r.HashingFile("one")
			r.HashingFile("two")
		}

		for deadline := time.Now().Add(time.Minute); r.estimatedBytes.Load() == 0 && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}

		end()

		if size := r.estimatedBytes.Load(); size < int64(len("first")+len("second")) || !roughly && size > int64(len("first")+len("second")) {
			t.Errorf("estimated as %v", size)
		}
	}
}
