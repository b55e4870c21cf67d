package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/pkg/errors"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/fs/localfs"
)

// Entries of a volume as kopia's own are, and with their whole status: kopia does not keep the time of the last change, for
// which each entry would have to be looked at once more.
// Source: kopia 0.23.1, fs/localfs (local_fs.go, local_fs_os.go).

// So many names are read at a time.
const namesAtOnce = 100

// localEntry is an entry as it was when it was listed.
type localEntry struct {
	os.FileInfo

	directory string
}

// openDirectory returns the directory at the path, which may be a link to it.
func openDirectory(path string) (fs.Directory, error) {
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, errors.Wrap(err, "unable to get local filesystem entry")
	}

	info, err := os.Lstat(resolved)
	if err != nil {
		return nil, errors.Wrap(err, "unable to determine entry type")
	}

	if !info.IsDir() {
		return nil, errors.Errorf("not a directory: %v", path)
	}

	return &localDirectory{localEntry{info, filepath.Dir(resolved)}}, nil
}

// statusOf returns the status of a local entry; nil: it has none, as what is on a device.
func statusOf(entry os.FileInfo) *syscall.Stat_t {
	status, _ := entry.Sys().(*syscall.Stat_t)

	return status
}

// LocalFilesystemPath implements fs.Entry.
func (e *localEntry) LocalFilesystemPath() string { return e.directory + "/" + e.Name() }

// ModTime implements fs.Entry: as kopia stores it, whatever it is.
func (e *localEntry) ModTime() time.Time { return time.Unix(0, e.FileInfo.ModTime().UnixNano()) }

// Owner implements fs.Entry.
func (e *localEntry) Owner() fs.OwnerInfo {
	if status := statusOf(e); status != nil {
		return fs.OwnerInfo{UserID: status.Uid, GroupID: status.Gid}
	}

	return fs.OwnerInfo{}
}

// Device implements fs.Entry.
func (e *localEntry) Device() fs.DeviceInfo {
	if status := statusOf(e); status != nil {
		return fs.DeviceInfo{Dev: status.Dev, Rdev: status.Rdev}
	}

	return fs.DeviceInfo{}
}

// Close implements fs.Entry.
func (e *localEntry) Close() {}

// localDirectory is a directory.
type localDirectory struct{ localEntry }

// Size implements fs.Entry.
func (d *localDirectory) Size() int64 { return 0 }

// SupportsMultipleIterations implements fs.Directory.
func (d *localDirectory) SupportsMultipleIterations() bool { return true }

// Child implements fs.Directory.
func (d *localDirectory) Child(_ context.Context, name string) (fs.Entry, error) {
	path := d.LocalFilesystemPath()

	info, err := os.Lstat(filepath.Join(path, name))
	if err == nil {
		return newLocalEntry(info, path)
	}

	if os.IsNotExist(err) {
		return nil, fs.ErrEntryNotFound
	}

	return nil, errors.Wrap(err, "unable to get child")
}

// Iterate implements fs.Directory.
func (d *localDirectory) Iterate(context.Context) (fs.DirectoryIterator, error) {
	path := d.LocalFilesystemPath()

	opened, err := os.Open(path)
	if err != nil {
		return nil, errors.Wrap(err, "unable to read directory")
	}

	return &localIterator{opened, path, nil}, nil
}

type localIterator struct {
	opened *os.File
	path   string
	batch  []os.DirEntry
}

// Next implements fs.DirectoryIterator.
func (i *localIterator) Next(context.Context) (fs.Entry, error) {
	for {
		if len(i.batch) == 0 {
			batch, err := i.opened.ReadDir(namesAtOnce)
			if errors.Is(err, io.EOF) {
				return nil, nil //nolint:nilnil // as kopia's iterators
			}

			if err != nil {
				return nil, err
			}

			i.batch = batch
		}

		found := i.batch[0]
		i.batch = i.batch[1:]

		if entry, err := i.look(found); entry != nil || err != nil {
			return entry, err
		}
	}
}

// look returns what was found; nil: it was deleted since. What may not be looked at fails by itself, without its directory.
func (i *localIterator) look(found os.DirEntry) (fs.Entry, error) {
	info, err := found.Info()

	var entry fs.Entry
	if err == nil {
		entry, err = newLocalEntry(info, i.path)
	}

	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, nil //nolint:nilnil // see above
	case errors.Is(err, os.ErrPermission):
		return &localError{localEntry{unknownInfo{found}, i.path}, err}, nil
	}

	return entry, errors.Wrap(err, "error reading directory")
}

// Close implements fs.DirectoryIterator.
func (i *localIterator) Close() {
	i.opened.Close() //nolint:errcheck // it was only read
}

// newLocalEntry returns the entry with this status. kopia has placeholders for what was not restored.
func newLocalEntry(info os.FileInfo, directory string) (fs.Entry, error) {
	entry := localEntry{info, directory}
	if strings.HasSuffix(info.Name(), localfs.ShallowEntrySuffix) {
		return localfs.NewEntry(entry.LocalFilesystemPath())
	}

	switch info.Mode() & os.ModeType {
	case 0:
		return &localFile{entry}, nil
	case os.ModeDir:
		return &localDirectory{entry}, nil
	case os.ModeSymlink:
		return &localLink{entry}, nil
	}

	return &localError{entry, fs.ErrUnknown}, nil
}

// localFile is a regular file.
type localFile struct{ localEntry }

// Open implements fs.File.
func (f *localFile) Open(context.Context) (fs.Reader, error) {
	opened, err := os.Open(f.LocalFilesystemPath())
	if err != nil {
		return nil, errors.Wrap(err, "unable to open local file")
	}

	return &localReader{opened, f.directory}, nil
}

type localReader struct {
	*os.File

	directory string
}

// Entry implements fs.Reader.
func (r *localReader) Entry() (fs.Entry, error) {
	info, err := r.Stat()
	if err != nil {
		return nil, errors.Wrap(err, "unable to stat() local file")
	}

	return &localFile{localEntry{info, r.directory}}, nil
}

// localLink is a symbolic link.
type localLink struct{ localEntry }

// Readlink implements fs.Symlink.
func (l *localLink) Readlink(context.Context) (string, error) {
	return os.Readlink(l.LocalFilesystemPath())
}

// Resolve implements fs.Symlink.
func (l *localLink) Resolve(context.Context) (fs.Entry, error) {
	target, err := filepath.EvalSymlinks(l.LocalFilesystemPath())
	if err != nil {
		return nil, errors.Wrapf(err, "cannot resolve symlink for '%q'", l.LocalFilesystemPath())
	}

	return localfs.NewEntry(target)
}

// localError is what cannot be backed up.
type localError struct {
	localEntry

	err error
}

// ErrorInfo implements fs.ErrorEntry.
func (e *localError) ErrorInfo() error { return e.err }

// unknownInfo is all that is known of an entry whose status is not.
type unknownInfo struct{ os.DirEntry }

func (i unknownInfo) Size() int64        { return 0 }
func (i unknownInfo) Mode() os.FileMode  { return i.Type() }
func (i unknownInfo) ModTime() time.Time { return time.Unix(0, 0) }
func (i unknownInfo) Sys() any           { return nil }
