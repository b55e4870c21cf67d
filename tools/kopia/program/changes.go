package main

import (
	"context"
	"io"
	"math"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pkg/errors"
	"golang.org/x/sys/unix"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/snapshotfs"
	"github.com/kopia/kopia/snapshot/upload"
)

// Changes that size and time of a file do not show.
//
// kopia takes a file from a parent if size, time, mode and owner are the parent's. A program can set the time, but not the
// time of the last change (ctime). So a file that was changed later than what the parent has is shown to kopia with a mode
// that no parent's entry has, and kopia reads it. What kopia stores has only the bits of fs.ModBits.
// Source: kopia 0.23.1, snapshot/upload/upload.go (metadataEquals, newDirEntry).
//
// A driver that copies files into a new volume gives all of them a new ctime. Such a volume is recognized, unless it is a
// live one: its root was created after the parent's changes, or has changed since without a new time, as has everything
// else in it. So is one in which all was changed after its snapshot was taken, as by labels of SELinux or the owner that a
// kubelet sets. A live volume that was restored is read once.
//
// A storage's snapshot of a volume in use can have a file's new times and old content, because the kernel writes data later.
// That is so of a volume that is labeled at its mount too. In a live volume, a program that writes to memory (mmap) gives a
// file a new time once, and no other one until the kernel has written that.

const (
	// kopia never stores this bit.
	changedMode = os.ModeTemporary

	// So many entries of a volume tell whether all of it is a copy.
	sampleSize = 1000

	// The clock of the kernel's times of files may be so far behind.
	clockTick = 10 * time.Millisecond

	// Some file systems cut times to seconds, such as ext4 with inodes of 128 bytes, and FAT to two: a file that is read can
	// change once more without a new time.
	coarseTick = 2 * time.Second

	// The kernel writes data so long after it has changed: 30 seconds, and up to 5 until the next look.
	// Source: Linux, mm/page-writeback.c (dirty_expire_interval, dirty_writeback_interval).
	writeback = time.Minute

	// What is overwritten so soon after its file was created is written with the rest of it, and a journal has the size of a
	// new file only once its data is on the disk. Source: Linux, Documentation/filesystems/ext4 (delayed allocation).
	writtenAtOnce = 30 * time.Second

	// A snapshot is taken at most so long before its backup is requested.
	takenBefore = time.Hour
)

// changes is what one walk through a volume finds out about the times of changes.
type changes struct {
	rep      repo.Repository
	parents  []parent
	copied   []bool
	most     time.Time
	roots    []fs.Directory
	progress upload.Progress
	newest   atomic.Int64

	// unsure says which times of files each parent may have without their data.
	unsure []span

	// checked: a parent is a checkpoint, which may lack content. kopia stores it also if a write beside it has failed.
	// Source: kopia 0.23.1, repo/content/content_manager.go (Flush).
	checked bool
}

// span is the time after one moment, up to another one.
type span struct{ after, until time.Time }

// watched is a directory of the volume whose changed files kopia reads.
type watched struct {
	fs.Directory

	changes *changes
	up      *watched

	once   sync.Once
	before []fs.Directory
}

// watchChanges returns the volume for kopia's uploader, and whether it is a copy of what one of the parents has.
func watchChanges(
	rep repo.Repository, root fs.Directory, decided *decision, manifests []*snapshot.Manifest, progress upload.Progress,
) (*watched, bool) {
	c := &changes{rep: rep, parents: decided.Parents, most: decided.RequestedAt, progress: progress}
	anyCopied, path := false, root.LocalFilesystemPath()
	mayBeCopy := decided.MayBeCopy && len(decided.Parents) > 0

	var changed time.Time
	if status := statusOf(root); status != nil {
		changed = changeTime(status)
		c.observe(changed, root.ModTime())
	}

	relabeled := mayBeCopy && !c.most.IsZero() && changed.After(c.most) && allChanged(path, c.most)

	for i, one := range manifests {
		if until := &c.parents[i].Until; !decided.MayBeCopy && until.After(rep.Time()) {
			// The clock was set back: what was changed since has an earlier time.
			*until = time.Time{}
		}

		copied := relabeled || (mayBeCopy && isCopy(path, decided.Parents[i].Until))
		directory, _ := snapshotfs.EntryFromDirEntry(rep, one.RootEntry).(fs.Directory)
		c.copied, c.roots = append(c.copied, copied), append(c.roots, directory)
		c.checked, anyCopied = c.checked || one.IncompleteReason != "", anyCopied || copied

		began := one.StartTime.ToTime()

		unsure := span{began.Add(-writeback), began}
		if decided.MayBeCopy {
			unsure.after = decided.Parents[i].Until.Add(-writeback)
		}

		c.unsure = append(c.unsure, unsure)
	}

	return &watched{Directory: root, changes: c}, anyCopied
}

// until returns the time up to which a snapshot that was begun at start has all changes. A device has no times of changes.
// What was idle before its state was taken has all data too: it has what was not changed later.
func (c *changes) until(start time.Time) time.Time {
	until := start.Add(-c.tick())
	if newest := time.Unix(0, c.newest.Load()); newest.UnixNano() != 0 && newest.Before(until) {
		until = newest
	}

	if !c.most.IsZero() && c.most.Before(until) {
		until = c.most
	}

	if c.most.Sub(until) > takenBefore+writeback {
		until = until.Add(writeback)
	}

	return until.UTC()
}

// tick returns how long an entry may change without a new time, as far as the times that were observed show.
func (c *changes) tick() time.Duration {
	if newest := c.newest.Load(); newest != 0 && newest%int64(time.Second) == 0 {
		return coarseTick
	}

	return clockTick
}

// observe takes the first of an entry's times, that of its change and that of its content, that is not of the mount: between
// the volume's state and its mount, the live volume may have changed.
func (c *changes) observe(times ...time.Time) {
	for _, at := range times {
		if !c.most.IsZero() && at.After(c.most) {
			continue
		}

		nanos := at.UnixNano()
		for seen := c.newest.Load(); nanos > seen && !c.newest.CompareAndSwap(seen, nanos); seen = c.newest.Load() {
		}

		return
	}
}

// Iterate implements fs.Directory.
func (w *watched) Iterate(ctx context.Context) (fs.DirectoryIterator, error) {
	inner, err := w.Directory.Iterate(ctx)
	if err != nil {
		return nil, w.orGone(err, w.Directory)
	}

	return &watchedIterator{inner, w}, nil
}

type watchedIterator struct {
	fs.DirectoryIterator

	directory *watched
}

// Next implements fs.DirectoryIterator.
func (i *watchedIterator) Next(ctx context.Context) (fs.Entry, error) {
	w := i.directory

	entry, err := i.DirectoryIterator.Next(ctx)
	if entry != nil {
		return w.watch(ctx, entry), nil
	}

	// A deleted directory cannot be listed further, and kopia skips what is not found under the path of a moved one.
	if errors.Is(err, os.ErrNotExist) || w.isMoved() {
		path := w.LocalFilesystemPath()
		w.changes.progress.Error(path, goneError{os.ErrNotExist, path}, false)

		return nil, nil //nolint:nilnil // as kopia's iterators
	}

	return nil, err
}

// watch returns the entry for kopia's uploader, whose error says whether it was deleted since it was listed. A placeholder has
// no status, nor has what is on a device.
func (w *watched) watch(ctx context.Context, entry fs.Entry) fs.Entry {
	status := statusOf(entry)
	if status == nil {
		return entry
	}

	changed := changeTime(status)
	w.changes.observe(changed, entry.ModTime())

	switch entry := entry.(type) {
	case fs.Directory:
		return &watched{Directory: entry, changes: w.changes, up: w}
	case fs.File:
		return w.watchFile(ctx, &listedFile{File: entry, in: w}, changed)
	case fs.Symlink:
		link := &listedLink{entry, w}
		if older, _ := w.changes.compare(link, changed); older {
			return &changedLink{link}
		}

		return link
	}

	return entry
}

// goneError is the error of an entry that was deleted since it was listed. It is left out, as is one that was deleted
// before. If all of its directory, or the entry as one, was deleted or moved, that has the path.
type goneError struct {
	error

	directory string
}

// orGone returns the error as a goneError if the entry, in this directory or itself, is gone; one that is still there cannot
// be read.
func (w *watched) orGone(err error, entry fs.Entry) error {
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}

	if w.isMoved() {
		return goneError{err, w.LocalFilesystemPath()}
	}

	if _, left := os.Lstat(entry.LocalFilesystemPath()); !os.IsNotExist(left) {
		return err
	}

	return goneError{error: err}
}

// isMoved returns whether something else is under the path of the directory now. Some file systems change the number of a
// directory, but not also its time.
func (w *watched) isMoved() bool {
	listed := statusOf(w)
	if listed == nil {
		return false
	}

	found, err := os.Lstat(w.LocalFilesystemPath())
	if err != nil {
		return os.IsNotExist(err)
	}

	now := statusOf(found)

	return (now.Ino != listed.Ino || now.Dev != listed.Dev) && now.Ctim != listed.Ctim
}

// listedFile is what was there when it was first opened: kopia opens a large file for each part, and another one may have
// replaced it meanwhile.
type listedFile struct {
	fs.File

	in    *watched
	mu    sync.Mutex
	first fs.Reader
}

// statter is an open file of the system.
type statter interface {
	io.ReaderAt
	Stat() (os.FileInfo, error)
}

// Open implements fs.File. The data mover watches the positions of what is open, so a part has its own if possible.
func (f *listedFile) Open(ctx context.Context) (fs.Reader, error) {
	opened, err := f.File.Open(ctx)

	f.mu.Lock()
	defer f.mu.Unlock()

	first, later := f.first.(statter)

	switch {
	case !later && err != nil:
		return nil, f.in.orGone(err, f.File)
	case !later:
		f.first = opened

		return keptReader{opened}, nil
	case err == nil && isSame(first, opened):
		return opened, nil
	case err == nil:
		opened.Close() //nolint:errcheck // nothing was read
	}

	return &sharedReader{keptReader{f.first}, io.NewSectionReader(first, 0, math.MaxInt64)}, nil
}

// Close implements fs.Entry.
func (f *listedFile) Close() {
	if f.first != nil {
		f.first.Close() //nolint:errcheck // it was only read
	}

	f.File.Close()
}

func isSame(first statter, opened fs.Reader) bool {
	one, err := first.Stat()
	other, err2 := opened.(statter).Stat() //nolint:forcetypeassert // as the first one

	return err == nil && err2 == nil && os.SameFile(one, other)
}

// keptReader stays open until its entry is closed.
type keptReader struct{ fs.Reader }

// Close implements io.Closer.
func (r keptReader) Close() error { return nil }

// sharedReader reads an open file from a position of its own.
type sharedReader struct {
	keptReader

	content *io.SectionReader
}

// Read implements io.Reader.
func (r *sharedReader) Read(into []byte) (int, error) { return r.content.Read(into) }

// Seek implements io.Seeker.
func (r *sharedReader) Seek(offset int64, whence int) (int64, error) {
	return r.content.Seek(offset, whence)
}

type listedLink struct {
	fs.Symlink

	in *watched
}

// Readlink implements fs.Symlink.
func (l listedLink) Readlink(ctx context.Context) (string, error) {
	target, err := l.Symlink.Readlink(ctx)

	return target, l.in.orGone(err, l.Symlink)
}

// compare returns whether kopia must not take an entry from a parent by itself, as that is older than the change, and the
// parents that are not.
func (c *changes) compare(entry fs.Entry, changed time.Time) (older bool, others []int) {
	older = c.checked

	for i, one := range c.parents {
		at := changed
		if c.copied[i] {
			// All of the volume has a new one.
			at = time.Time{}
		}

		if at.After(one.Until) || c.mayLackData(i, entry, at) {
			older = true
		} else {
			others = append(others, i)
		}
	}

	return older, others
}

// mayLackData returns whether a parent may have the times of an entry and not yet its data. A write sets no later time; a
// program may set an earlier one, but not that of the change.
func (c *changes) mayLackData(index int, entry fs.Entry, changed time.Time) bool {
	var last time.Time

	for _, at := range []time.Time{entry.ModTime(), changed} {
		if unsure := c.unsure[index]; at.After(unsure.after) && !at.After(unsure.until) && at.After(last) {
			last = at
		}
	}

	if last.IsZero() {
		return false
	}

	var status unix.Statx_t
	// An error comes again when the entry is read.
	_ = unix.Statx(unix.AT_FDCWD, entry.LocalFilesystemPath(), unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BTIME, &status)

	return status.Mask&unix.STATX_BTIME == 0 || last.Sub(toTime(status.Btime)) > writtenAtOnce
}

// watchFile hides a file from parents that are older than its last change; one that has it since, such as a checkpoint of
// an earlier attempt, still serves.
func (w *watched) watchFile(ctx context.Context, file fs.File, changed time.Time) fs.Entry {
	older, others := w.changes.compare(file, changed)
	if !older {
		return file
	}

	hidden := changedFile{file}

	for _, i := range others {
		if known := w.find(ctx, i, file); known != nil {
			return &knownFile{hidden, known, w.changes}
		}
	}

	return &hidden
}

// find returns the entry of the file in a parent if it is the same by size, time, mode and owner.
func (w *watched) find(ctx context.Context, index int, file fs.File) *snapshot.DirEntry {
	directory := w.directories(ctx)[index]
	if directory == nil {
		return nil
	}

	found, err := directory.Child(ctx, file.Name())
	if err != nil || found.Size() != file.Size() || !found.ModTime().Equal(file.ModTime()) || found.Mode() != file.Mode() ||
		found.Owner() != file.Owner() {
		return nil
	}

	if entry, stored := found.(snapshot.HasDirEntry); stored {
		return entry.DirEntry()
	}

	return nil
}

// directories returns this directory in each parent, nil where that has none.
func (w *watched) directories(ctx context.Context) []fs.Directory {
	if w.up == nil {
		return w.changes.roots
	}

	w.once.Do(func() {
		for _, above := range w.up.directories(ctx) {
			var found fs.Directory

			if above != nil {
				if child, err := above.Child(ctx, w.Name()); err == nil {
					found, _ = child.(fs.Directory)
				}
			}

			w.before = append(w.before, found)
		}
	})

	return w.before
}

type changedFile struct{ fs.File }

// Mode implements fs.Entry.
func (f changedFile) Mode() os.FileMode { return f.File.Mode() | changedMode }

type changedLink struct{ fs.Symlink }

// Mode implements fs.Entry.
func (l changedLink) Mode() os.FileMode { return l.Symlink.Mode() | changedMode }

// knownFile is a file that a parent has.
type knownFile struct {
	changedFile

	entry   *snapshot.DirEntry
	changes *changes
}

// DirEntryOrNil implements snapshot.HasDirEntryOrNil, by which kopia takes a file without reading it, if the repository has
// its content. Only the uploader asks, once; the estimate of the size walks through the same files.
func (f knownFile) DirEntryOrNil(ctx context.Context) (*snapshot.DirEntry, error) {
	if _, err := f.changes.rep.VerifyObject(ctx, f.entry.ObjectID); err != nil {
		return nil, nil //nolint:nilnil // it is read
	}

	f.changes.progress.CachedFile(f.Name(), f.Size())

	return f.entry, nil
}

// isCopy returns whether all of a volume was written after that time, although it may have older files.
func isCopy(root string, until time.Time) bool {
	var status unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, root, 0, unix.STATX_BTIME|unix.STATX_CTIME|unix.STATX_MTIME, &status); err != nil {
		return false
	}

	if status.Mask&unix.STATX_BTIME != 0 {
		return toTime(status.Btime).After(until)
	}

	if !toTime(status.Ctime).After(until) || toTime(status.Mtime).After(until) {
		return false
	}

	return allChanged(root, until)
}

func toTime(at unix.StatxTimestamp) time.Time {
	return time.Unix(at.Sec, int64(at.Nsec))
}

// allChanged returns whether a sample of the volume, level by level, has nothing that was last changed before that time.
func allChanged(root string, until time.Time) bool {
	looked := 0

	for level := []string{root}; len(level) > 0 && looked < sampleSize; {
		directory := level[0]
		level = level[1:]

		names, _ := readNames(directory, sampleSize-looked)
		for _, name := range names {
			path := filepath.Join(directory, name)

			found, err := os.Lstat(path)
			if err != nil {
				continue
			}

			if !changeTime(statusOf(found)).After(until) {
				return false
			}

			looked++

			if found.IsDir() {
				level = append(level, path)
			}
		}
	}

	return true
}

func readNames(directory string, most int) ([]string, error) {
	opened, err := os.Open(directory)
	if err != nil {
		return nil, err
	}
	defer opened.Close() //nolint:errcheck

	return opened.Readdirnames(most)
}

// changeTime returns the ctime.
func changeTime(status *syscall.Stat_t) time.Time { return time.Unix(status.Ctim.Unix()) }
