package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kopia/kopia/fs"
)

func TestChangesThatSizeAndTimeDoNotShowAreRead(t *testing.T) {
	b := newBench(t)
	link := filepath.Join(b.volume, "link")
	must(t, os.Symlink("one", link))

	first := b.backUp(decision{}).result.Snapshot
	b.write("below/two", "SECOND")

	second := b.backUp(after(t, first))

	if second.last.HashedFiles != 1 || second.last.CachedFiles != 2 {
		t.Errorf("the progress is %+v", second.last)
	}

	old, changed := b.entry(first, "below/two"), b.entry(second.result.Snapshot, "below/two")
	if old.ObjectID == changed.ObjectID || changed.Permissions != 0o640 || changed.ModTime != old.ModTime {
		t.Errorf("the entry is %+v, was %+v", changed, old)
	}
}

func TestCopiedVolumeIsNotReadAgain(t *testing.T) {
	b := newBench(t)
	decided := after(t, b.backUp(decision{}).result.Snapshot)
	decided.MayBeCopy = true
	b.recreate()

	second := b.backUp(decided)

	if second.last.HashedFiles != 0 || !second.result.Copied {
		t.Errorf("the result is %+v, the progress %+v", second.result, second.last)
	}

	// From then on its own changes count.
	b.write("one", "FIRST")

	if third := b.backUp(after(t, second.result.Snapshot)); third.last.HashedFiles != 1 || third.result.Copied {
		t.Errorf("the result is %+v, the progress %+v", third.result, third.last)
	}
}

func TestVolumeThatIsLabeledAtItsMountIsNotReadAgain(t *testing.T) {
	b := newBench(t)
	parent := b.backUp(decision{}).result.Snapshot

	for range 2 {
		var written time.Time

		for _, name := range []string{"below", "."} {
			status, err := os.Stat(filepath.Join(b.volume, name))
			must(t, err)

			if status.ModTime().After(written) {
				written = status.ModTime()
			}
		}

		decided := after(t, parent)
		decided.MayBeCopy, decided.RequestedAt = true, time.Now()

		time.Sleep(2 * clockTick)

		// The root has a new file by then, and all has a new ctime.
		b.write("three", "third")

		for _, name := range []string{"one", "below/two", "below", "three", "."} {
			must(t, os.Lchown(filepath.Join(b.volume, name), os.Getuid(), os.Getgid()))
		}

		made := b.backUp(decided)
		if parent = made.result.Snapshot; made.last.HashedFiles > 1 || !made.result.Copied {
			t.Errorf("the result is %+v, the progress %+v", made.result, made.last)
		}

		// The snapshot may be taken long before it is requested.
		if until := after(t, parent).Parents[0].Until; !until.Equal(written) {
			t.Errorf("it has the changes until %v, not %v", until, written)
		}
	}
}

// changed returns the time of a file's last change.
func (b *bench) changed(name string) time.Time {
	b.Helper()

	found, err := os.Lstat(filepath.Join(b.volume, name))
	must(b.T, err)

	return changeTime(statusOf(found))
}

func TestChangesOfTheMountAreNotTheWorkloads(t *testing.T) {
	b := newBench(t)
	last := b.changed("below/two")

	time.Sleep(2 * clockTick)

	decided := decision{MayBeCopy: true, RequestedAt: time.Now()}

	time.Sleep(2 * clockTick)

	// As drivers do at a mount: the files keep their times.
	must(t, os.Chmod(b.volume, 0o777))

	if until := after(t, b.backUp(decided).result.Snapshot).Parents[0].Until; !until.Equal(last) {
		t.Errorf("it has the changes until %v, not %v", until, last)
	}
}

// The parent is as one whose files were written for 40 seconds, and that was begun 20 later.
func TestDataThatTheKernelWritesLaterIsRead(t *testing.T) {
	for kind, requested := range map[string]time.Time{"as it was": {}, "labeled at its mount": time.Now().Add(-time.Hour)} {
		b := newBench(t)
		now := time.Now()
		times := map[string]time.Time{
			"one": now.Add(40 * time.Second), "created": now.Add(writtenAtOnce - time.Second), "ahead": now.Add(time.Hour),
		}
		set := func() {
			for name, at := range times {
				must(t, os.Chtimes(filepath.Join(b.volume, name), at, at))
			}
		}

		b.write("created", "third")
		b.write("ahead", "fourth")
		set()

		first := *b.backUp(decision{}).result.Snapshot
		first.StartTime = fs.UTCTimestampFromTime(now.Add(time.Minute))
		decided := after(t, b.save(first))
		decided.MayBeCopy, decided.RequestedAt, decided.Parents[0].Until = true, requested, now.Add(50*time.Second)

		b.write("one", "FIRST")
		set()

		second := b.backUp(decided)
		if second.last.HashedFiles != 1 || second.last.CachedFiles != 3 || second.result.Copied == requested.IsZero() {
			t.Errorf("%v: the result is %+v, the progress %+v", kind, second.result, second.last)
		}

		if b.entry(&first, "one").ObjectID == b.entry(second.result.Snapshot, "one").ObjectID {
			t.Errorf("%v: the old content was kept", kind)
		}
	}
}

// TestDataThatIsWrittenUnderAnOldTimeMayLag has a file that was changed so long after the test created it, or at no known time.
func TestDataThatIsWrittenUnderAnOldTimeMayLag(t *testing.T) {
	b, now := newBench(t), time.Now()
	root, err := openDirectory(b.volume)
	must(t, err)
	file, err := root.Child(context.Background(), "one")
	must(t, err)

	for _, one := range []struct {
		after  time.Duration
		copied bool
		want   bool
	}{
		{40 * time.Second, false, true},
		{40 * time.Second, true, false},
		{writtenAtOnce - time.Second, false, false},
		{-20 * time.Second, false, false},
	} {
		c := &changes{
			parents: []parent{{Until: now.Add(50 * time.Second)}}, copied: []bool{one.copied},
			unsure: []span{{now.Add(-10 * time.Second), now.Add(time.Minute)}},
		}

		if older, _ := c.compare(file, now.Add(one.after)); older != one.want {
			t.Errorf("%+v: %v", one, older)
		}
	}
}

// TestTimesThatAreCutMayHideAChange has the newest file of a volume, and a backup that begins in the second of its change.
func TestTimesThatAreCutMayHideAChange(t *testing.T) {
	start := time.Unix(1000, 5e8).UTC()

	for changed, want := range map[time.Time]time.Time{
		time.Unix(1000, 0): start.Add(-coarseTick), time.Unix(1000, 1e6): time.Unix(1000, 1e6).UTC(), time.Unix(900, 0): time.Unix(900, 0).UTC(),
		time.Unix(1001, 1): start.Add(-clockTick), {}: start.Add(-clockTick),
	} {
		c := &changes{}
		if !changed.IsZero() {
			c.observe(changed)
		}

		if until := c.until(start); !until.Equal(want) {
			t.Errorf("changed at %v: it has the changes until %v, not %v", changed, until, want)
		}
	}
}

func TestIdleVolumeHasItsData(t *testing.T) {
	b := newBench(t)
	last := b.changed("below/two")

	for waited, added := range map[time.Duration]time.Duration{time.Hour: 0, 2 * time.Hour: writeback} {
		made := b.backUp(decision{MayBeCopy: true, RequestedAt: last.Add(waited)})
		if until := after(t, made.result.Snapshot).Parents[0].Until; !until.Equal(last.Add(added)) {
			t.Errorf("%v after the last change: it has the changes until %v, not %v", waited, until, last.Add(added))
		}
	}
}

// TestClockThatWasSetBackHidesNoChange has a parent that was made while the clock was ahead.
func TestClockThatWasSetBackHidesNoChange(t *testing.T) {
	b := newBench(t)
	first := b.backUp(decision{}).result.Snapshot
	decided := after(t, first)
	decided.Parents[0].Until = time.Now().Add(time.Hour)
	b.write("one", "FIRST")

	second := b.backUp(decided).result.Snapshot
	if b.entry(first, "one").ObjectID == b.entry(second, "one").ObjectID {
		t.Error("the old content was kept")
	}

	if third := b.backUp(after(t, second)); third.last.HashedFiles != 0 {
		t.Errorf("the progress is %+v", third.last)
	}
}

func TestLiveVolumeIsNoCopy(t *testing.T) {
	b := newBench(t)
	decided := after(t, b.backUp(decision{}).result.Snapshot)
	b.recreate()
	b.write("one", "FIRST")

	if second := b.backUp(decided); second.last.HashedFiles != 2 || second.result.Copied {
		t.Errorf("the result is %+v, the progress %+v", second.result, second.last)
	}
}

func TestSampleFindsWhatWasNotChanged(t *testing.T) {
	b := newBench(t)
	time.Sleep(2 * clockTick)

	past, now := time.Now().Add(-time.Minute), time.Now()
	if !allChanged(b.volume, past) || allChanged(b.volume, now) {
		t.Errorf("all of it was changed now")
	}

	b.write("one", "again")

	if allChanged(b.volume, now) {
		t.Errorf("only one file has changed")
	}
}

// TestContentThatIsMappedMayChangeWithoutANewTime has a file that was created long before its last change.
func TestContentThatIsMappedMayChangeWithoutANewTime(t *testing.T) {
	b := newBench(t)
	path := filepath.Join(b.volume, "one")

	file, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)

	defer file.Close() //nolint:errcheck // tests

	mapped, err := unix.Mmap(int(file.Fd()), 0, len("first"), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)

	defer unix.Munmap(mapped) //nolint:errcheck // tests

	// Only the first write to a page that is not dirty sets the times.
	mapped[0] = 'F'
	later := time.Now().Add(writtenAtOnce + time.Second)
	must(t, os.Chtimes(path, later, later))
	b.reopen(writeback - time.Second)

	first := b.backUp(decision{}).result.Snapshot
	mapped[1] = 'I'

	second := b.backUp(after(t, first)).result.Snapshot
	if b.entry(first, "one").ObjectID == b.entry(second, "one").ObjectID {
		t.Error("the old content was kept")
	}

	b.reopen(2 * writeback)

	if third := b.backUp(after(t, b.backUp(after(t, second)).result.Snapshot)); third.last.HashedFiles != 0 {
		t.Errorf("the progress is %+v", third.last)
	}
}

func TestLargeFileThatIsReplacedIsReadAsItWas(t *testing.T) {
	b, ctx := newBench(t), context.Background()
	root, err := openDirectory(b.volume)
	must(t, err)
	found, err := root.Child(ctx, "one")
	must(t, err)

	entry := (&watched{Directory: root, changes: &changes{}}).watch(ctx, found)
	defer entry.Close()

	read := ""

	for _, start := range []int64{0, 3} {
		part, err := entry.(fs.File).Open(ctx) //nolint:forcetypeassert // tests
		must(t, err)
		_, err = part.Seek(start, io.SeekStart)
		must(t, err)
		content, err := io.ReadAll(io.LimitReader(part, 3))
		must(t, err)
		must(t, part.Close())

		read += string(content)

		b.write("new", "FIRST")
		must(t, os.Rename(filepath.Join(b.volume, "new"), filepath.Join(b.volume, "one")))
	}

	if read != "first" {
		t.Errorf("%q was read", read)
	}
}
