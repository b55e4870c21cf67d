package main

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
)

// again returns the decision to back up the storage's snapshot of a volume that is requested then, after another backup.
func again(t *testing.T, before *snapshot.Manifest, requestedAt time.Time) decision {
	t.Helper()

	decided := after(t, before)
	decided.MayBeCopy, decided.RequestedAt, decided.Before = true, requestedAt, before.RootObjectID()

	return decided
}

// touch gives the files of the volume this time.
func (b *bench) touch(at time.Time) {
	b.Helper()

	for _, name := range []string{"one", "below/two"} {
		must(b.T, os.Chtimes(filepath.Join(b.volume, name), at, at))
	}
}

// A rename of a directory gives its files no new time of change.
func (b *bench) exchange(directory string) {
	b.Helper()
	must(b.T, os.RemoveAll(filepath.Join(b.volume, "below")))
	must(b.T, os.Rename(directory, filepath.Join(b.volume, "below")))
}

func TestDataThatTheKernelWroteAfterItsTimesIsReadOnce(t *testing.T) {
	b := newBench(t)
	at, old, written := time.Now(), filepath.Join(b.volume, "below"), filepath.Join(filepath.Dir(b.volume), "written")

	b.write("below/two", "SECOND")
	b.touch(at)
	must(t, os.Rename(old, written))
	must(t, os.Mkdir(old, 0o700))
	time.Sleep(2 * clockTick)
	b.write("below/two", "second")
	b.touch(at)

	first := b.backUp(decision{MayBeCopy: true, RequestedAt: time.Now()}).result.Snapshot
	b.exchange(written)

	second := b.backUp(again(t, first, time.Now().Add(2*snapshotWait)))
	if made := second.result; b.entry(made.Snapshot, "below/two").ObjectID == b.entry(first, "below/two").ObjectID || made.Copied {
		t.Errorf("the file is the parent's")
	}

	if second.last.HashedFiles != 2 || *second.result.ChangedBytes != int64(len("second")) {
		t.Errorf("the result is %+v, the progress %+v", second.result, second.last)
	}

	third := b.backUp(again(t, second.result.Snapshot, time.Now().Add(3*snapshotWait)))
	if third.last.HashedFiles != 0 || *third.result.ChangedBytes != 0 {
		t.Errorf("the result is %+v, the progress %+v", third.result, third.last)
	}
}

func TestCopyOfDataThatTheKernelWroteAfterItsTimesIsReadOnce(t *testing.T) {
	b := newBench(t)
	at := time.Now()
	b.touch(at)

	parent, hashed := b.backUp(decision{MayBeCopy: true, RequestedAt: time.Now()}).result.Snapshot, []int64{}

	for range 2 {
		must(t, os.RemoveAll(filepath.Join(filepath.Dir(b.volume), "copy")))
		b.recreate()
		b.write("below/two", "SECOND")
		b.touch(at)

		made := b.backUp(again(t, parent, time.Now().Add(2*snapshotWait)))
		if parent = made.result.Snapshot; !made.result.Copied || *made.result.ChangedBytes != 3*made.last.HashedFiles {
			t.Errorf("the result is %+v, the progress %+v", made.result, made.last)
		}

		hashed = append(hashed, made.last.HashedFiles)
	}

	if hashed[0] != 2 || hashed[1] != 0 {
		t.Errorf("%v files were read", hashed)
	}
}

func TestCopyOfAFileFromTheFutureIsNotReadAgain(t *testing.T) {
	b := newBench(t)
	b.touch(time.Now().Add(time.Hour).Truncate(time.Hour))
	parent := b.backUp(decision{MayBeCopy: true, RequestedAt: time.Now()}).result.Snapshot
	future := b.entry(parent, "one").ModTime.ToTime()
	b.recreate()
	b.touch(future)

	if made := b.backUp(again(t, parent, time.Now())); made.last.HashedFiles != 0 || !made.result.Copied {
		t.Errorf("the result is %+v, the progress %+v", made.result, made.last)
	}
}

func TestSnapshotHasTheChangesWhoseDataTheKernelHadWritten(t *testing.T) {
	request := time.Date(2026, 11, 28, 10, 0, 0, 0, time.UTC)
	ago := func(before time.Duration) time.Time { return request.Add(-before) }

	for name, one := range map[string]struct {
		newest, written, want time.Time
		copied                bool
	}{
		"in use":                     {newest: ago(0), written: ago(time.Second), want: ago(time.Second + writeback)},
		"only new owners":            {newest: ago(time.Second), written: ago(time.Hour), want: ago(time.Second + writeback)},
		"at rest":                    {newest: ago(snapshotWait), written: ago(time.Hour), want: ago(snapshotWait)},
		"labeled":                    {want: request},
		"labeled and in use":         {written: ago(time.Second), want: ago(time.Second + writeback)},
		"copied":                     {newest: ago(0), written: ago(time.Minute), want: ago(time.Minute + writeback), copied: true},
		"copied at rest":             {newest: ago(2 * time.Hour), written: ago(time.Hour), want: ago(time.Hour), copied: true},
		"after the request, at rest": {newest: request.Add(1), written: request.Add(1), want: request},
	} {
		c := &changes{most: request, copied: []bool{one.copied}}
		for latest, at := range map[*atomic.Int64]time.Time{&c.newest: one.newest, &c.written: one.written} {
			if !at.IsZero() {
				c.observe(latest, at)
			}
		}

		if until := c.until(request.Add(time.Hour)); !until.Equal(one.want) {
			t.Errorf("%v: it has the changes until %v, not %v", name, until, one.want)
		}
	}
}

func TestOnlyOtherContentCounts(t *testing.T) {
	b := newBench(t)
	b.write("gone", "gone")
	b.write("file", "file")
	must(t, os.Mkdir(filepath.Join(b.volume, "directory"), 0o700))

	first := b.backUp(decision{}).result.Snapshot
	b.touch(time.Now())
	b.write("below/two", "changed")
	b.write("below/added", "12")

	for _, name := range []string{"gone", "file", "directory"} {
		must(t, os.Remove(filepath.Join(b.volume, name)))
	}

	b.write("directory", "123")
	must(t, os.Symlink("somewhere", filepath.Join(b.volume, "link")))
	must(t, os.Mkdir(filepath.Join(b.volume, "file"), 0o700))
	b.write("file/below", "1234")

	second := b.backUp(again(t, first, time.Now()))
	if changed := *second.result.ChangedBytes; changed != int64(len("changed"+"12"+"123"+"1234")) {
		t.Errorf("%v bytes have changed, the progress is %+v", changed, second.last)
	}
}

func TestSnapshotThatCannotBeComparedFailsNoBackup(t *testing.T) {
	b := newBench(t)
	decided := again(t, b.backUp(decision{}).result.Snapshot, time.Now())

	var err error

	decided.Before, err = object.ParseID("k0123456789abcdef0123456789abcdef")
	must(t, err)

	if made := b.backUp(decided).result; made.ChangedBytes != nil || made.Snapshot.IncompleteReason != "" {
		t.Errorf("the result is %+v", made)
	}
}
