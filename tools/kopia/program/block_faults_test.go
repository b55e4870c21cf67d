package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
)

func TestWrongDeviceIsRefused(t *testing.T) {
	b := newBench(t)
	_, path := b.device(zeroBlock)

	var pipe [2]int

	must(t, unix.Pipe(pipe[:]))

	read, err := unix.Open(path, unix.O_RDONLY, 0)
	must(t, err)

	folder, err := unix.Open(filepath.Dir(path), unix.O_RDONLY, 0)
	must(t, err)

	for _, one := range []struct {
		fd       int
		size     int64
		writable bool
		want     string
	}{
		{-1, blockSize, false, "not of an open device"},
		{9999, blockSize, false, "not of an open device"},
		{2, blockSize, false, "not of an open device"},
		{pipe[0], blockSize, false, "neither"},
		{folder, blockSize, false, "neither"},
		{read, blockSize, true, "open for something else"},
		{read, blockSize + 1, false, "1048576 bytes, not 1048577"},
		{read, -1, false, "not -1"},
	} {
		if _, err := openDevice(one.fd, one.size, one.writable); err == nil || !strings.Contains(err.Error(), one.want) {
			t.Errorf("%+v: %v", one, err)
		}
	}

	empty := filepath.Join(t.TempDir(), "empty")
	must(t, os.WriteFile(empty, nil, 0o600))

	fd, err := unix.Open(empty, unix.O_RDONLY, 0)
	must(t, err)

	if _, err := openDevice(fd, 0, false); err == nil {
		t.Error("an empty device was opened")
	}
}

func TestDeviceThatShrinksFails(t *testing.T) {
	b := newBench(t)
	from, path := b.device(make([]byte, 2*blockSize))
	must(t, os.Truncate(path, blockSize))

	report := newReport(io.Discard, io.Discard)
	defer report.stop()

	err := backUpDevice(context.Background(), b.rep, blockSource, from, strings.NewReader("{}"), report)
	if err == nil || !strings.Contains(err.Error(), "read the device at 1048576: the device has become shorter") {
		t.Errorf("%v", err)
	}
}

func TestDeviceThatShrinksIsNoWholeFile(t *testing.T) {
	b := newBench(t)
	from, path := b.device(make([]byte, 2*blockSize))
	must(t, os.Truncate(path, blockSize+1))

	var messages bytes.Buffer

	report := newReport(io.Discard, &messages)
	decided := strings.NewReader(`{"path": "/", "file": "device", "checkpoint_seconds": 600, "changes_tag": "` + changesTag + `"}`)
	err := backUp(context.Background(), b.rep, testSource, from, decided, report)

	report.stop()

	if err == nil || !strings.Contains(messages.String(), "read the device at 1048577: the device has become shorter") {
		t.Errorf("%v, %s", err, &messages)
	}

	must(t, b.rep.Refresh(context.Background()))

	if left := b.backUp(decision{}).offer.Snapshots; len(left) != 1 || left[0].IncompleteReason == "" {
		t.Errorf("the repository has %+v", left)
	}
}

// TestDamagedListWritesNothing restores lists that random damage has changed: each is refused, or is still one of that size.
func TestDamagedListWritesNothing(t *testing.T) {
	b, random := newBench(t), newSeeded()
	content := random.bytes(3 * blockSize)
	valid := b.content(indexOf(b, b.writeDevice(content, blockDecision{}).Snapshot.RootObjectID()))
	damaged := damage(random, valid, 300)
	there, refused := bytes.Repeat([]byte{0xff}, 3*blockSize), 0

	for _, text := range damaged {
		made := &blockResult{Snapshot: &snapshot.Manifest{RootEntry: &snapshot.DirEntry{ObjectID: b.writeList(text)}}}

		restored, _, err := b.readDevice(made, 3*blockSize, there, false)
		if err == nil {
			list, err := loadBlocks(context.Background(), b.rep, made.Snapshot.RootObjectID())
			must(t, err)
			must(t, list.check())

			continue
		}

		refused++

		if !strings.Contains(err.Error(), "block") && !strings.Contains(err.Error(), "directory") {
			t.Errorf("%s: %v", text, err)
		}

		if strings.Contains(err.Error(), "list") && !bytes.Equal(restored, there) {
			t.Errorf("%s: something was written", text)
		}
	}

	if refused < 200 {
		t.Errorf("only %v of %v were refused", refused, len(damaged))
	}
}

// writeList writes a directory whose only file has this list of three blocks.
func (b *bench) writeList(text string) object.ID {
	b.Helper()

	var root object.ID

	must(b.T, repo.WriteSession(context.Background(), b.rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) error {
		writer := w.NewObjectWriter(ctx, object.WriterOptions{Prefix: "x", Compressor: metadataCompressor, Splitter: listSplitter})
		defer writer.Close() //nolint:errcheck // tests

		if _, err := writer.Write([]byte(text)); err != nil {
			return err
		}

		id, err := writer.Result()
		if err != nil {
			return err
		}

		content, err := object.ParseID("I" + id.String())
		if err != nil {
			return err
		}

		root, err = writeRoot(ctx, w, "device", content, 3*blockSize)

		return err
	}))
	must(b.T, b.rep.Refresh(context.Background()))

	return root
}

func indexOf(b *bench, root object.ID) object.ID {
	var directory snapshot.DirManifest

	must(b.T, json.Unmarshal([]byte(b.content(root)), &directory))

	index, _ := directory.Entries[0].ObjectID.IndexObjectID()

	return index
}

func TestRestoreIsRefusedBeforeAnythingIsWritten(t *testing.T) {
	b := newBench(t)
	made := b.writeDevice(make([]byte, blockSize+512), blockDecision{})
	there := bytes.Repeat([]byte{0xff}, blockSize)

	for size, want := range map[int]string{
		blockSize + 512: "too small", 0: "list of blocks is for 2097152 bytes, not 0", -1: "not -1", 2*blockSize + 1: "not 2097153",
	} {
		restored, _, err := b.readDevice(made, size, there, false)
		if err == nil || !strings.Contains(err.Error(), want) || !bytes.Equal(restored, there) {
			t.Errorf("%v: %v", size, err)
		}
	}
}

// largest is the number of bytes of the largest write.
type largest int

func (l *largest) Write(data []byte) (int, error) {
	*l = max(*l, largest(len(data)))

	return len(data), nil
}

type spaces struct{}

func (spaces) Read(data []byte) (int, error) {
	return copy(data, bytes.Repeat([]byte{' '}, len(data))), nil
}

// TestListIsNeverOneText has lists of large devices, whose text would take much memory.
func TestListIsNeverOneText(t *testing.T) {
	var most largest

	must(t, newBlockList(10000).encode(&most))

	if most > 1000 {
		t.Errorf("%v bytes were written at once", most)
	}

	rest := &io.LimitedReader{R: spaces{}, N: 1 << 24}
	if _, err := decodeList(io.MultiReader(strings.NewReader(`{"entries":[{"l":"damaged"},`), rest)); err == nil || rest.N < 1<<23 {
		t.Errorf("%v bytes are left: %v", rest.N, err)
	}
}
