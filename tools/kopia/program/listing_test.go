package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pkg/errors"
	"golang.org/x/sys/unix"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/fs/localfs"
)

// describe returns what the uploader sees of an entry.
func describe(t *testing.T, entry fs.Entry) string {
	t.Helper()

	ctx, seen := context.Background(), ""

	switch entry := entry.(type) {
	case fs.File:
		reader, err := entry.Open(ctx)
		must(t, err)

		content, err := io.ReadAll(reader)
		must(t, err)

		again, err := reader.Entry()
		must(t, err)
		must(t, reader.Close())

		seen = fmt.Sprintf("%q %v %v %v", content, again.Name(), again.LocalFilesystemPath(), again.Mode())
	case fs.Symlink:
		target, err := entry.Readlink(ctx)
		must(t, err)

		found, err := entry.Resolve(ctx)
		seen = fmt.Sprintf("%v %v %v", target, found, err)
	case fs.ErrorEntry:
		seen = fmt.Sprint(entry.ErrorInfo())
	case fs.Directory:
		seen = fmt.Sprint(entry.SupportsMultipleIterations(), list(t, entry))
	}

	return fmt.Sprintln(entry.Name(), entry.LocalFilesystemPath(), entry.IsDir(), entry.Mode(), entry.Size(), entry.ModTime(), entry.Owner(), entry.Device(), seen)
}

func list(t *testing.T, directory fs.Directory) map[string]string {
	t.Helper()

	found, ctx := map[string]string{}, context.Background()

	must(t, fs.IterateEntries(ctx, directory, func(_ context.Context, entry fs.Entry) error {
		found[entry.Name()] = describe(t, entry)

		child, err := directory.Child(ctx, filepath.Base(entry.LocalFilesystemPath()))
		must(t, err)

		if again := describe(t, child); again != found[entry.Name()] {
			t.Errorf("%v by its name: %v", found[entry.Name()], again)
		}

		return nil
	}))

	return found
}

func TestVolumeIsListedAsByKopia(t *testing.T) {
	b := newBench(t)
	for i := range 2*namesAtOnce + 1 {
		b.write(fmt.Sprint("below/file", i), fmt.Sprint(i))
	}

	path := func(name string) string { return filepath.Join(b.volume, name) }
	must(t, os.Symlink("one", path("link")))
	must(t, os.Mkdir(path("empty"), 0o1777))
	must(t, unix.Mkfifo(path("pipe"), 0o600))
	must(t, os.WriteFile(path("not UTF-8 \xff"), nil, 0o4755))
	must(t, os.Chtimes(path("below/two"), time.Time{}, time.Date(2400, 1, 1, 0, 0, 0, 1, time.UTC)))
	must(t, os.Symlink(b.volume, path("../linked")))

	ours, err := openDirectory(path("../linked"))
	must(t, err)
	theirs, err := localfs.Directory(b.volume)
	must(t, err)

	if found, wanted := describe(t, ours), describe(t, theirs); found != wanted || strings.Count(found, "file") < 2*namesAtOnce {
		t.Errorf("%v is not %v", found, wanted)
	}

	if _, err := ours.Child(context.Background(), "absent"); !errors.Is(err, fs.ErrEntryNotFound) {
		t.Error(err)
	}
}

func TestPlaceholderIsKopias(t *testing.T) {
	b := newBench(t)
	name := "one" + localfs.ShallowEntrySuffix
	must(t, os.Mkdir(filepath.Join(b.volume, name), 0o700))

	root, err := openDirectory(b.volume)
	must(t, err)
	found, err := root.Child(context.Background(), name)
	must(t, err)

	if wanted, _ := localfs.NewEntry(filepath.Join(b.volume, name)); fmt.Sprintf("%T", found) != fmt.Sprintf("%T", wanted) {
		t.Errorf("%T is not %T", found, wanted)
	}
}

// unread is a name whose status cannot be read.
type unread struct {
	os.DirEntry

	err error
}

func (u unread) Info() (os.FileInfo, error) {
	return nil, &os.PathError{Op: "lstat", Path: u.Name(), Err: u.err}
}

func TestEntryWithoutAStatus(t *testing.T) {
	b := newBench(t)
	names, err := os.ReadDir(b.volume)
	must(t, err)

	i := &localIterator{path: b.volume}

	if entry, err := i.look(unread{names[0], syscall.ENOENT}); entry != nil || err != nil {
		t.Errorf("gone: %v, %v", entry, err)
	}

	if entry, err := i.look(unread{names[0], syscall.EIO}); entry != nil || !errors.Is(err, syscall.EIO) {
		t.Errorf("not readable: %v, %v", entry, err)
	}

	entry, err := i.look(unread{names[0], syscall.EACCES})
	must(t, err)

	failed, isError := entry.(fs.ErrorEntry)
	if !isError || !errors.Is(failed.ErrorInfo(), syscall.EACCES) || !failed.IsDir() || failed.Name() != "below" || !failed.Mode().IsDir() ||
		failed.Size() != 0 || failed.ModTime().Unix() != 0 || failed.Owner() != (fs.OwnerInfo{}) || failed.Device() != (fs.DeviceInfo{}) {
		t.Errorf("not permitted: %+v", entry)
	}
}
