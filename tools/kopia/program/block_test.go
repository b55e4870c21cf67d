package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/snapshotfs"
)

var blockSource = snapshot.SourceInfo{Host: "default", UserName: "default", Path: "snapshot-data-upload-download/velero-block/app/data"}

// seeded is a source of random numbers and bytes that are the same each time.
type seeded struct {
	*rand.Rand
	*rand.ChaCha8
}

func newSeeded() seeded {
	source := rand.NewChaCha8([32]byte{1})

	return seeded{rand.New(source), source} //nolint:gosec // tests
}

func (s seeded) bytes(count int) []byte {
	data := make([]byte, count)
	s.ChaCha8.Read(data) //nolint:errcheck // it never fails

	return data
}

// device makes a file with that content, and opens it as a device.
func (b *bench) device(content []byte) (*device, string) {
	b.Helper()

	path := filepath.Join(b.TempDir(), "device")
	must(b.T, os.WriteFile(path, content, 0o600))

	return b.open(path, int64(len(content))), path
}

func (b *bench) open(path string, size int64) *device {
	b.Helper()

	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(b.T, err)

	opened, err := openDevice(fd, size, true)
	must(b.T, err)
	b.Cleanup(func() { opened.file.Close() }) //nolint:errcheck // tests

	return opened
}

// writeDevice backs a device with that content up.
func (b *bench) writeDevice(content []byte, decided blockDecision) *blockResult {
	b.Helper()

	decided.Parallel = 3
	document, err := json.Marshal(decided)
	must(b.T, err)

	var out bytes.Buffer

	from, _ := b.device(content)
	report := newReport(&out, io.Discard)
	must(b.T, backUpDevice(context.Background(), b.rep, blockSource, from, bytes.NewReader(document), report))
	must(b.T, b.rep.Refresh(context.Background()))

	lines := bytes.Split(bytes.TrimSpace(out.Bytes()), []byte("\n"))

	var last struct {
		Result *blockResult `json:"result"`
	}

	must(b.T, json.Unmarshal(lines[len(lines)-1], &last))

	return last.Result
}

// readDevice restores a snapshot over a device with the content there.
func (b *bench) readDevice(made *blockResult, size int, there []byte, compare bool) ([]byte, *restored, error) {
	b.Helper()

	var out bytes.Buffer

	to, path := b.device(there)
	reader, report := &blockReader{to: to, parallel: 3, compare: compare}, newReport(&out, io.Discard)
	err := restoreDevice(context.Background(), b.rep, made.Snapshot.RootObjectID(), int64(size), reader, report)

	report.stop()

	content, readErr := os.ReadFile(path)
	must(b.T, readErr)

	return content, &restored{reader.written.Load(), reader.zeroed.Load(), reader.kept.Load()}, err
}

func (b *bench) content(id object.ID) string {
	b.Helper()

	reader, err := b.rep.OpenObject(context.Background(), id)
	must(b.T, err)

	found, err := io.ReadAll(reader)
	must(b.T, err)

	return string(found)
}

func TestDeviceIsStoredAsVeleroDoes(t *testing.T) {
	b, random := newBench(t), newSeeded()
	content := append(random.bytes(blockSize), make([]byte, blockSize+100)...)
	made := b.writeDevice(content, blockDecision{Tags: map[string]string{"a": "1"}, Pins: []string{"pin"}})

	var root snapshot.DirManifest

	written := b.content(made.Snapshot.RootObjectID())
	must(t, json.Unmarshal([]byte(written), &root))

	id := root.Entries[0].ObjectID
	// As Velero main at d2241adba encodes udmrepo.Metadata (WriteMetadata in pkg/repository/udmrepo/kopialib/lib_repo.go).
	want := fmt.Sprintf(`{"stream":"kopia:directory","entries":[{"name":"snapshot-data-upload-download-velero-block-app-data",`+
		`"type":"f","mode":"0777","size":3145728,"mtime":"1754-08-30T22:43:41.128654848Z","obj":"%v"}],"summary":null}`+"\n", id)
	if written != want {
		t.Errorf("the directory is %s, not %s", written, want)
	}

	index, ok := id.IndexObjectID()
	if !ok || !strings.HasPrefix(id.String(), "Ix") {
		t.Fatalf("the object of the device is %v", id)
	}

	list, err := loadBlocks(context.Background(), b.rep, made.Snapshot.RootObjectID())
	must(t, err)

	// As it encodes its indirectObject.
	want = fmt.Sprintf(`{"stream":"kopia:indirect","entries":[{"l":1048576,"o":"%v"},{"s":1048576,"l":1048576,"o":"%v"},`+
		`{"s":2097152,"l":1048576,"o":"%v"}]}`+"\n", list[0].Object, list[1].Object, list[1].Object)
	if written := b.content(index); written != want {
		t.Errorf("the list is %s, not %s", written, want)
	}

	if b.content(list[0].Object) != string(content[:blockSize]) || b.content(list[1].Object) != string(zeroBlock) {
		t.Error("the blocks have other data")
	}

	one := made.Snapshot
	if one.Tags["a"] != "1" || one.Tags[sourceSizeTag] != "2097252" || one.Description != "Block Uploader" || one.Pins[0] != "pin" ||
		one.Source != blockSource || one.Stats.TotalFileSize != 3*blockSize || one.RootEntry.DirSummary.TotalFileSize != 3*blockSize ||
		one.RootEntry.Permissions != 0o777 {
		t.Errorf("the snapshot is %+v, its directory %+v", one, one.RootEntry)
	}
}

// TestChainIsRestored backs a device up again and again, and restores it over a larger one and over what is restored already.
func TestChainIsRestored(t *testing.T) {
	b, random := newBench(t), newSeeded()
	content, target := random.bytes(5*blockSize+512), random.bytes(20*blockSize)

	var parent manifest.ID

	for range 30 {
		before := bytes.Clone(content)

		switch random.IntN(4) {
		case 0:
			content = append(content, make([]byte, 512*random.IntN(4096))...)
		case 1:
			content = content[:len(content)-512*random.IntN(len(content)/1024)]
		case 2:
			at := random.IntN(len(content))
			clear(content[at:min(len(content), at+2*blockSize)])
		default:
			copy(content[random.IntN(len(content)):], random.bytes(random.IntN(blockSize)))
		}

		content = content[:min(len(content), len(target))]
		made := b.writeDevice(content, blockDecision{Parent: parent})

		var want int64

		for at := 0; at < len(content); at += blockSize {
			block, old := blockOf(content, at), blockOf(before, at)
			if parent == "" && !isZero(block) || parent != "" && !bytes.Equal(block, old) {
				want += blockSize
			}
		}

		if want = min(want, int64(len(content))); made.ChangedBytes != want || made.ParentFault != "" {
			t.Fatalf("%v bytes were changed, not %v; %s", want, made.ChangedBytes, made.ParentFault)
		}

		restored, done, err := b.readDevice(made, len(content), target, false)
		must(t, err)

		if !bytes.Equal(restored[:len(content)], content) || !bytes.Equal(restored[len(content):], target[len(content):]) {
			t.Fatal("the restored device differs")
		}

		if again, kept, err := b.readDevice(made, len(content), restored, true); err != nil || !bytes.Equal(again, restored) ||
			kept.KeptBytes != int64(len(content)) || kept.WrittenBytes+kept.ZeroedBytes != 0 || done.KeptBytes != 0 {
			t.Fatalf("what is equal was written: %+v, after %+v: %v", kept, done, err)
		}

		parent = made.Snapshot.ID
	}

	// kopia reads all of it back.
	found, err := snapshot.ListSnapshots(context.Background(), b.rep, blockSource)
	must(t, err)

	verifier := snapshotfs.NewVerifier(context.Background(), b.rep, snapshotfs.VerifierOptions{VerifyFilesPercent: 100})
	_, err = verifier.InParallel(context.Background(), func(tw *snapshotfs.TreeWalker) error {
		for _, one := range found {
			root, err := snapshotfs.SnapshotRoot(b.rep, one)
			if err != nil {
				return err
			}

			if err := tw.Process(context.Background(), root, ""); err != nil {
				return err
			}
		}

		return nil
	})
	must(t, err)

	if len(found) != 30 {
		t.Errorf("the repository has %v snapshots", len(found))
	}
}

// blockOf returns the block at an offset as it is stored.
func blockOf(content []byte, at int) []byte {
	block := make([]byte, blockSize)
	if at < len(content) {
		copy(block, content[at:])
	}

	return block
}

func TestOnlyWhatDiffersIsWritten(t *testing.T) {
	b, random := newBench(t), newSeeded()
	content := append(random.bytes(3*blockSize), make([]byte, 2*blockSize)...)
	made := b.writeDevice(content, blockDecision{})

	there := bytes.Clone(content)
	there[blockSize], there[4*blockSize] = there[blockSize]+1, 1

	restored, done, err := b.readDevice(made, len(content), there, true)
	if err != nil || !bytes.Equal(restored, content) || done.WrittenBytes != blockSize || done.ZeroedBytes != blockSize {
		t.Errorf("the restore is %+v: %v", done, err)
	}
}

func TestParentThatCannotBeReadIsSaid(t *testing.T) {
	b := newBench(t)
	files := b.backUp(decision{}).result.Snapshot

	for id, want := range map[manifest.ID]string{files.ID: "not one of a block device", "0123456789abcdef0123456789abcdef": "not found"} {
		made := b.writeDevice(zeroBlock, blockDecision{Parent: id})
		if !strings.Contains(made.ParentFault, want) || made.ChangedBytes != 0 {
			t.Errorf("parent %v: %+v", id, made)
		}
	}
}

// TestComparisonReadsNoBlockThatIsThere counts what a restore over a device reads from the repository.
func TestComparisonReadsNoBlockThatIsThere(t *testing.T) {
	b, random := newBench(t), newSeeded()
	content := append(random.bytes(20*blockSize), make([]byte, 5*blockSize+512)...)
	made := b.writeDevice(content, blockDecision{})
	there := append(bytes.Clone(content), random.bytes(2*blockSize)...)
	there[3*blockSize]++
	there[22*blockSize]++

	before := readCounters()["kopia_content_read_bytes_total"]

	restored, done, err := b.readDevice(made, len(content), there, true)
	if err != nil || !bytes.Equal(restored[:len(content)], content) || !bytes.Equal(restored[len(content):], there[len(content):]) {
		t.Fatalf("the restored device differs: %v", err)
	}

	// Two blocks, the list and the directory.
	read := readCounters()["kopia_content_read_bytes_total"] - before
	if read < blockSize || read > 3*blockSize || done.WrittenBytes != blockSize || done.ZeroedBytes != blockSize {
		t.Errorf("%v bytes were read, and %+v", read, done)
	}
}
