package main

import (
	"bytes"
	"context"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pkg/errors"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/blob"
	"github.com/kopia/kopia/repo/blob/filesystem"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/upload"
)

const checkpoints = "checkpoints"

// interrupt backs up some blocks of a device with that content, in an odd order, and then does something.
func (b *bench) interrupt(content []byte, count int, decided blockDecision, then func(context.Context, *blockWriter)) {
	b.Helper()

	from, _ := b.device(content)
	report := newReport(io.Discard, io.Discard)

	defer report.stop()

	if decided.Checkpoint == nil {
		decided.Checkpoint = &checkpointDecision{Path: checkpoints, Tags: map[string]string{"tag:a": "1"}, Seconds: 600}
	}

	must(b.T, repo.WriteSession(context.Background(), b.rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) error {
		writer, err := newBlockWriter(ctx, w, blockSource, from, &decided, report, &blockResult{})
		must(b.T, err)

		buffer := make([]byte, blockSize)
		for at := range count {
			must(b.T, writer.writeOne(ctx, at^1, buffer))
		}

		then(ctx, writer)

		return nil
	}))
	must(b.T, b.rep.Refresh(context.Background()))
}

// saveSome leaves a checkpoint of an even number of blocks.
func (b *bench) saveSome(content []byte, count int, decided blockDecision) (id manifest.ID) {
	b.Helper()
	b.interrupt(content, count, decided, func(ctx context.Context, writer *blockWriter) {
		must(b.T, writer.checkpoint.save(ctx, upload.IncompleteReasonCheckpoint))
		id = writer.checkpoint.saved.ID
	})

	return id
}

func (b *bench) saved() []*snapshot.Manifest {
	b.Helper()

	found, err := findCheckpoints(context.Background(), b.rep, blockSource)
	must(b.T, err)

	return found
}

func resumed(id manifest.ID, others ...manifest.ID) *checkpointDecision {
	return &checkpointDecision{Path: checkpoints, Seconds: 600, Resume: id, Replaces: append(others, id)}
}

func TestAnotherAttemptReadsTheRest(t *testing.T) {
	b, random, from := newBench(t), newSeeded(), newStorage(t)
	old := append(random.bytes(30*blockSize), make([]byte, 10*blockSize)...)
	content := append(bytes.Clone(old), random.bytes(512)...)
	copy(content[5*blockSize:], random.bytes(15*blockSize))

	first := b.writeDevice(old, blockDecision{})
	from.says(variableLength, len(content), extent{5 * blockSize, 15 * blockSize})

	for rule, decided := range map[string]blockDecision{
		"all":               {},
		"all, with parent":  {Parent: first.Snapshot.ID},
		"allocated":         {Changes: from.query("")},
		"changed since the": {Parent: first.Snapshot.ID, Changes: from.query("before")},
	} {
		if rule == "allocated" {
			from.says(variableLength, len(content), extent{0, 30 * blockSize})
		} else {
			from.says(variableLength, len(content), extent{5 * blockSize, 15 * blockSize})
		}

		whole := b.writeDevice(content, decided)
		id := b.saveSome(content, 34, decided)
		// What maintenance runs finds all that the checkpoint refers to.
		list, err := loadBlocks(context.Background(), b.rep, b.saved()[0].RootObjectID())
		must(t, err)
		must(t, list.verify(context.Background(), b.rep))

		decided.Checkpoint = resumed(id)
		made := b.writeDevice(content, decided)

		if made.CheckpointFault != "" || made.ChangesFault != "" || made.ResumedBytes != 34*blockSize ||
			made.ChangedBytes != whole.ChangedBytes || made.ReadBytes > (7+2*checkedBlocks)*blockSize {
			t.Errorf("%v: %+v, after %+v", rule, made, whole)
		}

		restored, _, err := b.readDevice(made, len(content), random.bytes(len(content)), false)
		if err != nil || !bytes.Equal(restored, content) {
			t.Errorf("%v: the restored device differs: %v", rule, err)
		}

		if len(b.saved()) != 0 {
			t.Errorf("%v: checkpoints are left", rule)
		}
	}
}

// TestCheckpointInDoubtIsNotUsed has checkpoints that are damaged, or of something else: all is read then.
func TestCheckpointInDoubtIsNotUsed(t *testing.T) {
	b, random := newBench(t), newSeeded()
	content := random.bytes(4*blockSize + 512)
	other := random.bytes(len(content))
	first := b.writeDevice(content, blockDecision{})
	all := map[string]string{ruleTag: "all"}

	save := func(root object.ID, tags map[string]string) manifest.ID {
		made, id := buildManifest(blockSource, root, 3*blockSize, tags, nil), manifest.ID("")
		made.Source.Path = checkpoints

		must(t, repo.WriteSession(context.Background(), b.rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) (err error) {
			id, err = snapshot.SaveSnapshot(ctx, w, made)

			return err
		}))
		must(t, b.rep.Refresh(context.Background()))

		return id
	}
	missing := `{"entries":[{"l":1048576,"o":"0123456789abcdef0123456789abcdef"},{"s":1048576,"l":1048576,"o":"0123456789abcdef0123456789abcdef"},` +
		`{"s":2097152,"l":1048576,"o":"0123456789abcdef0123456789abcdef"}]}`

	valid, err := loadBlocks(context.Background(), b.rep, first.Snapshot.RootObjectID())
	must(t, err)

	directory := first.Snapshot.RootObjectID().String()
	short := strings.NewReplacer("0123456789abcdef0123456789abcdef", directory).Replace(missing)
	short = strings.Replace(short, directory, valid[0].Object.String(), 1)

	var empty object.ID

	must(t, repo.WriteSession(context.Background(), b.rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) (err error) {
		empty, err = writeRoot(ctx, w, "device", b.deviceObject(b.writeList(`{"entries":[]}`)), 0)

		return err
	}))

	for want, id := range map[string]manifest.ID{
		"it has 0 bytes, the device 4194": save(empty, all),
		"block 1 has ":                    save(b.writeList(short), all),
		"not found":                       "0123456789abcdef0123456789abcdef",
		"its blocks were read otherwise":  first.Snapshot.ID,
		"it has 9437184 bytes":            save(b.writeDevice(random.bytes(9*blockSize), blockDecision{}).Snapshot.RootObjectID(), all),
		"the device has other bytes at 0": b.saveSome(other, 4, blockDecision{}),
		"block 0: ":                       save(b.writeList(missing), all),
		"read the list of blocks":         save(b.writeList(missing[:100]), all),
		"entry 1 of the list of blocks":   save(b.writeList(strings.Replace(missing, "1048576,\"l\"", "1048577,\"l\"", 1)), all),
	} {
		made := b.writeDevice(content, blockDecision{Checkpoint: resumed(id)})
		if !strings.Contains(made.CheckpointFault, want) || made.ResumedBytes != 0 || made.ReadBytes < int64(len(content)) {
			t.Errorf("%+v, not %q", made, want)
		}

		restored, _, err := b.readDevice(made, len(content), other, false)
		if err != nil || !bytes.Equal(restored, content) {
			t.Errorf("the restored device differs when %v: %v", want, err)
		}
	}
}

// fullStorage writes no blocks: each write fails once the channel is closed.
type fullStorage struct {
	blob.Storage

	fail <-chan struct{}
}

func (f *fullStorage) PutBlob(ctx context.Context, id blob.ID, data blob.Bytes, options blob.PutOptions) error {
	if !strings.HasPrefix(string(id), "p") {
		return f.Storage.PutBlob(ctx, id, data, options)
	}

	<-f.fail

	return errors.New("the storage is full")
}

func (f *fullStorage) ConnectionInfo() blob.ConnectionInfo {
	return blob.ConnectionInfo{Type: "full", Config: f.Storage.ConnectionInfo().Config}
}

// TestCheckpointWithoutItsBlocksIsNotSaved has a write of blocks fail while a checkpoint waits for it.
func TestCheckpointWithoutItsBlocksIsNotSaved(t *testing.T) {
	b, ctx, fail := newBench(t), context.Background(), make(chan struct{})
	folder := filepath.Dir(b.volume)

	blob.AddSupportedStorage("full", filesystem.Options{}, func(ctx context.Context, options *filesystem.Options, _ bool) (blob.Storage, error) {
		found, err := filesystem.New(ctx, options, false)

		return &fullStorage{found, fail}, err
	})

	store, err := blob.NewStorage(ctx, blob.ConnectionInfo{
		Type: "full", Config: &filesystem.Options{Path: filepath.Join(folder, "store")},
	}, false)
	must(t, err)

	config := filepath.Join(folder, "full")
	options := repo.ConnectOptions{ClientOptions: repo.ClientOptions{Hostname: "default", Username: "default"}}
	must(t, repo.Connect(ctx, config, store, "password", &options))

	rep, err := repo.Open(ctx, config, "password", nil)
	must(t, err)

	defer rep.Close(ctx) //nolint:errcheck // tests

	// More than kopia puts into one file of the repository.
	from, _ := b.device(newSeeded().bytes(24 * blockSize))
	report := newReport(io.Discard, io.Discard)

	defer report.stop()

	decided := &blockDecision{Checkpoint: &checkpointDecision{Path: checkpoints, Seconds: 600}}

	err = repo.WriteSession(ctx, rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) error {
		writer, err := newBlockWriter(ctx, w, blockSource, from, decided, report, &blockResult{})
		must(t, err)

		written := make(chan error)

		go func() {
			written <- inParallel(ctx, len(writer.list), 1, writer.writeOne)
		}()

		for writer.checkpoint.done() < 19 {
			time.Sleep(time.Millisecond)
		}

		time.AfterFunc(200*time.Millisecond, func() { close(fail) })

		if err := writer.checkpoint.save(ctx, upload.IncompleteReasonCheckpoint); err == nil {
			t.Error("a checkpoint was saved")
		}

		return <-written
	})
	if err == nil || !strings.Contains(err.Error(), "the storage is full") {
		t.Errorf("the backup did not fail: %v", err)
	}

	must(t, b.rep.Refresh(ctx))

	if found := b.saved(); len(found) != 0 {
		t.Errorf("there is the checkpoint %+v", found[0])
	}
}

// TestOneCheckpointIsThereAtATime has ticks, a signal, and another attempt: each replaces what was saved before.
func TestOneCheckpointIsThereAtATime(t *testing.T) {
	b, random := newBench(t), newSeeded()
	content, ticks := random.bytes(8*blockSize), make(chan time.Time)

	b.interrupt(content, 4, blockDecision{}, func(ctx context.Context, writer *blockWriter) {
		// The second tick comes once the first one has been dealt with.
		end := writer.checkpoint.saveEach(ctx, ticks)
		ticks <- time.Time{}
		ticks <- time.Time{}
		end()

		if writer.checkpoint.saved == nil {
			t.Fatal("no checkpoint was saved")
		}
	})

	first := b.saved()
	if len(first) != 1 || first[0].Stats.TotalFileSize != 4*blockSize || first[0].IncompleteReason != "checkpoint" ||
		first[0].Tags["tag:a"] != "1" || first[0].Pins != nil || first[0].Source.Path != checkpoints {
		t.Fatalf("the checkpoints are %+v", first)
	}

	b.interrupt(content, 6, blockDecision{Checkpoint: resumed(first[0].ID)}, func(ctx context.Context, writer *blockWriter) {
		writer.checkpoint.stopped.Store(true)

		if complete, err := writer.writeAll(ctx, &blockDecision{Checkpoint: writer.checkpoint.decided, Parallel: 2}); complete || err != nil {
			t.Errorf("the backup was not ended: %v", err)
		}
	})

	second := b.saved()
	if len(second) != 1 || second[0].Stats.TotalFileSize != 6*blockSize || second[0].IncompleteReason != "canceled" {
		t.Fatalf("the checkpoints are %+v", second)
	}

	if parent := b.latest(); parent != nil {
		t.Errorf("Velero takes %+v for a parent", parent)
	}
}

// flakyWriter has one flush fail: the second one, which writes a checkpoint.
type flakyWriter struct {
	repo.DirectRepositoryWriter

	flushes int
}

func (f *flakyWriter) Flush(ctx context.Context) error {
	if f.flushes++; f.flushes == 2 {
		return errors.New("no answer")
	}

	return f.DirectRepositoryWriter.Flush(ctx)
}

func TestCheckpointThatMayNotBeStoredIsSavedAgain(t *testing.T) {
	b := newBench(t)
	b.interrupt(newSeeded().bytes(4*blockSize), 4, blockDecision{}, func(ctx context.Context, writer *blockWriter) {
		flaky := &flakyWriter{DirectRepositoryWriter: writer.w.(repo.DirectRepositoryWriter)} //nolint:forcetypeassert // tests
		writer.w = flaky

		if err := writer.checkpoint.save(ctx, upload.IncompleteReasonCheckpoint); err == nil {
			t.Fatal("a checkpoint was saved")
		}

		for range 2 {
			must(t, writer.checkpoint.save(ctx, upload.IncompleteReasonCanceled))
		}

		if flaky.flushes != 4 {
			t.Errorf("%v flushes", flaky.flushes)
		}
	})

	if found := b.saved(); len(found) != 1 || found[0].IncompleteReason != upload.IncompleteReasonCanceled {
		t.Errorf("the checkpoints are %+v", found)
	}
}

func TestAbandonedCheckpointsAreFound(t *testing.T) {
	b, ctx := newBench(t), context.Background()
	id := b.saveSome(make([]byte, 2*blockSize), 2, blockDecision{})
	b.writeDevice(zeroBlock, blockDecision{})

	complete := b.saved()[0]
	complete.ID, complete.IncompleteReason = "", ""

	must(t, repo.WriteSession(ctx, b.rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) error {
		_, err := snapshot.SaveSnapshot(ctx, w, complete)

		return err
	}))

	for age, want := range map[time.Duration]int{abandonedAge - time.Hour: 0, abandonedAge + time.Hour: 1} {
		found, err := findAbandoned(ctx, b.rep, time.Now().Add(age))
		must(t, err)

		if len(found) != want || want > 0 && found[0] != id {
			t.Errorf("after %v: %v", age, found)
		}
	}
}

func TestABackupOfFilesDeletesAbandonedCheckpoints(t *testing.T) {
	b := newBench(t)
	b.saveSome(make([]byte, 2*blockSize), 2, blockDecision{})

	for _, one := range []struct {
		age  time.Duration
		want int
	}{{abandonedAge - time.Hour, 1}, {abandonedAge + time.Hour, 0}} {
		b.reopen(one.age)
		b.backUp(decision{})

		if found := b.saved(); len(found) != one.want {
			t.Errorf("after %v: %v", one.age, found)
		}
	}
}
