package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/snapshotfs"
)

const (
	changeTag = "cbt-change-id"
	volumeTag = "cbt-volume-id"
)

// disk is a volume and its snapshots, by handle. A driver compares them, and its answer may break off.
type disk struct {
	volume  string
	content []byte
	shots   map[string][]byte
}

// answer returns what the volume has now that the base does not have; breaks is after which share of it the call fails.
func (d *disk) answer(base string, breaks float64) ([]extent, error) {
	old, found := d.shots[base]
	if base != "" && !found {
		return nil, status.Errorf(codes.NotFound, "snapshot %s does not exist", base)
	}

	old = append(bytes.Clone(old), make([]byte, len(d.content))...)
	changed := differences(old[:len(d.content)], d.content, 8)

	if breaks < 0 {
		return changed, nil
	}

	return changed[:int(breaks*float64(len(changed)))], status.Error(codes.Internal, "it broke")
}

// veleros is the writer of Velero's data mover: a block that is not written is the one of the parent, or beyond its end zeros.
// Source: Velero main at d2241adba, pkg/repository/udmrepo/kopialib/lib_repo.go (kopiaObjectWriterEx).
type veleros struct {
	*bench

	w               repo.RepositoryWriter
	entries, parent []object.IndirectObjectEntry
}

func (v *veleros) write(content []byte, options object.WriterOptions) object.ID {
	v.Helper()

	writer := v.w.NewObjectWriter(context.Background(), options)
	defer writer.Close() //nolint:errcheck // tests

	_, err := writer.Write(content)
	must(v.T, err)

	id, err := writer.Result()
	must(v.T, err)

	return id
}

func (v *veleros) put(block []byte) {
	id := v.write(block, object.WriterOptions{Splitter: "FIXED-1M"})
	v.entries = append(v.entries, object.IndirectObjectEntry{Start: int64(len(v.entries)) << 20, Length: 1 << 20, Object: id})
}

func (v *veleros) extend(count int) {
	if end := min(count, len(v.parent)); len(v.entries) < end {
		v.entries = append(v.entries, v.parent[len(v.entries):end]...)
	}

	for len(v.entries) < count {
		v.put(make([]byte, 1<<20))
	}
}

// backUpAsVelero backs a volume up as Velero does, and returns whether it took blocks from a parent.
// Source: Velero main at d2241adba, pkg/uploader/block/snapshot.go (snapshotSource), pkg/uploader/cbt/set.go.
func (b *bench) backUpAsVelero(d *disk, tags map[string]string, breaks float64) (*snapshot.Manifest, bool) {
	b.Helper()

	v := &veleros{bench: b}
	base := v.findParent(d.volume)
	bitmap := make([]bool, blocks(int64(len(d.content))))
	changed, err := d.answer(base, breaks)

	for _, one := range changed {
		for at := one.offset >> 20; at < (one.offset+one.length+1<<20-1)>>20; at++ {
			bitmap[at] = true
		}
	}

	if err != nil {
		v.parent, bitmap = nil, slices.Repeat([]bool{true}, len(bitmap))
	}

	made := &snapshot.Manifest{
		Source: blockSource, Description: "Block Uploader", Pins: []string{"velero-pin"}, Tags: maps.Clone(tags),
		Stats: snapshot.Stats{TotalFileSize: int64(len(bitmap)) << 20},
	}
	made.Tags["bdev-source-size"] = strconv.Itoa(len(d.content))

	must(b.T, repo.WriteSession(context.Background(), b.rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) error {
		v.w, made.StartTime = w, fs.UTCTimestampFromTime(w.Time())
		v.putMarked(d.content, bitmap)

		root := v.writeRoot()
		made.EndTime = fs.UTCTimestampFromTime(w.Time())
		made.RootEntry = &snapshot.DirEntry{Type: snapshot.EntryTypeDirectory, ObjectID: root, Permissions: 0o777}
		_, err := snapshot.SaveSnapshot(ctx, w, made)

		return err
	}))
	must(b.T, b.rep.Refresh(context.Background()))

	return made, v.parent != nil
}

// findParent loads the entries of the last snapshot if that is of this volume, and returns its handle, or nothing.
// Source: Velero main at d2241adba, pkg/uploader/block/snapshot.go (getParentBackupInfo).
func (v *veleros) findParent(volume string) string {
	v.Helper()

	latest := v.latest()
	if latest == nil || latest.Tags[changeTag] == "" || latest.Tags[volumeTag] != volume {
		return ""
	}

	index, _ := v.deviceObject(latest.RootObjectID()).IndexObjectID()

	var list struct {
		Entries []object.IndirectObjectEntry `json:"entries"`
	}

	must(v.T, json.Unmarshal([]byte(v.content(index)), &list))
	v.parent = list.Entries

	return latest.Tags[changeTag]
}

// putMarked writes what is marked, and then the end.
// Source: Velero main at d2241adba, pkg/uploader/block/uploader.go (backupData, copyTailData).
func (v *veleros) putMarked(content []byte, bitmap []bool) {
	v.Helper()

	for at, marked := range bitmap {
		if marked {
			v.extend(at)
			v.put(blockOf(content, at<<20))
		}
	}

	if last := len(bitmap) - 1; len(content)&(1<<20-1) == 0 {
		v.extend(len(bitmap))
	} else if !bitmap[last] {
		v.extend(last)
		v.put(blockOf(content, last<<20))
	}
}

// writeRoot writes the list of entries, and the directory.
// Source: Velero main at d2241adba, pkg/repository/udmrepo/kopialib/lib_repo.go (writeIndirectObject, WriteMetadata).
func (v *veleros) writeRoot() object.ID {
	v.Helper()

	text, err := json.Marshal(struct {
		Stream  string                       `json:"stream"`
		Entries []object.IndirectObjectEntry `json:"entries"`
	}{"kopia:indirect", v.entries})
	must(v.T, err)

	list := v.write(text, object.WriterOptions{Prefix: "x", Compressor: "zstd-fastest", Splitter: "FIXED-128K"})
	content, err := object.ParseID("I" + list.String())
	must(v.T, err)

	file := &snapshot.DirEntry{
		Name: objectName(blockSource.Path), Type: snapshot.EntryTypeFile, Permissions: 0o777,
		FileSize: int64(len(v.entries)) << 20, ObjectID: content,
	}
	directory := &snapshot.DirManifest{StreamType: "kopia:directory", Entries: []*snapshot.DirEntry{file}}
	root, err := snapshotfs.WriteDirManifest(context.Background(), v.w, "bdev-root", directory, "zstd-fastest")
	must(v.T, err)

	return root
}

// latest returns the last snapshot of the device, or nil.
func (b *bench) latest() *snapshot.Manifest {
	b.Helper()

	found, err := snapshot.ListSnapshots(context.Background(), b.rep, blockSource)
	must(b.T, err)

	if len(found) == 0 {
		return nil
	}

	return slices.MaxFunc(found, func(one, other *snapshot.Manifest) int {
		return one.StartTime.ToTime().Compare(other.StartTime.ToTime())
	})
}

// backUpAsDecided backs a volume up as ours does, and returns whether it took blocks from a parent: its base is the handle of
// the parent, if that is of the same volume.
// Source: datamover/data_path/parents.py (choose_blocks).
func (b *bench) backUpAsDecided(from *storage, d *disk, tags map[string]string, breaks float64) (*snapshot.Manifest, bool) {
	b.Helper()

	decided := blockDecision{Tags: maps.Clone(tags), Pins: []string{"velero-pin"}}
	base := ""

	if latest := b.latest(); latest != nil {
		decided.Parent = latest.ID
		if latest.Tags[volumeTag] == d.volume {
			base = latest.Tags[changeTag]
		}
	}

	changed, err := d.answer(base, breaks)
	from.says(variableLength, len(d.content), changed...)
	from.err, decided.Changes = err, from.query(base)

	made := b.writeDevice(d.content, decided)
	if (made.ChangesFault != "") != (err != nil) {
		b.Errorf("%v: %q is in doubt", err, made.ChangesFault)
	}

	return made.Snapshot, base != "" && err == nil
}

// TestChainWithVelero has each of the two back up on the parent of the other. The call of each position fails in one of the
// chains: at its beginning, in its middle or at its end. Bases are lost, and other volumes get the name.
func TestChainWithVelero(t *testing.T) {
	for number := range 3 {
		b, random, from := newBench(t), newSeeded(), newStorage(t)
		d := &disk{volume: "first", content: random.bytes(4*blockSize + 512), shots: map[string][]byte{}}
		taken := 0

		for at := range 31 {
			d.change(random)

			switch at {
			case 7, 8, 18, 21:
				clear(d.shots)
			case 12, 23:
				d.volume, d.content = fmt.Sprintf("volume %v", at), random.bytes(3*blockSize+1024)
			}

			breaks := -1.0
			if at%3 == number {
				breaks = float64((at/3+at)%3) / 2
			}

			tags := map[string]string{
				"snapshot-requester": "snapshot-data-upload-download", "snapshot-uploader": "velero-block",
				changeTag: fmt.Sprintf("snapshot %v", at), volumeTag: d.volume,
			}

			backUp := b.backUpAsVelero
			if at%2 == number%2 {
				backUp = func(d *disk, tags map[string]string, breaks float64) (*snapshot.Manifest, bool) {
					return b.backUpAsDecided(from, d, tags, breaks)
				}
			}

			made, increment := backUp(d, tags, breaks)
			if increment {
				taken++
			}

			d.shots[tags[changeTag]] = bytes.Clone(d.content)
			if fault := b.compare(made, d.content, random); fault != "" {
				t.Fatalf("chain %v, backup %v: %v", number, at, fault)
			}
		}

		if taken < 12 {
			t.Errorf("chain %v: only %v backups took blocks from a parent", number, taken)
		}
	}
}

// compare returns how a snapshot differs from a device, as Velero reads it and as ours does.
func (b *bench) compare(made *snapshot.Manifest, content []byte, random seeded) string {
	b.Helper()

	if made.Tags["bdev-source-size"] != strconv.Itoa(len(content)) {
		return "it is of " + made.Tags["bdev-source-size"] + " bytes"
	}

	if stored := b.content(b.deviceObject(made.RootObjectID())); stored[:len(content)] != string(content) {
		return "what is stored differs"
	}

	restored, _, err := b.readDevice(&blockResult{Snapshot: made}, len(content), random.bytes(len(content)), false)
	if err != nil || !bytes.Equal(restored, content) {
		return fmt.Sprintf("the restored device differs: %v", err)
	}

	return ""
}

// change writes, discards, lets a volume grow or shrink, or does nothing.
func (d *disk) change(random seeded) {
	d.content = bytes.Clone(d.content)

	switch at := random.IntN(len(d.content)); random.IntN(6) {
	case 0:
		d.content = append(d.content, random.bytes(512*random.IntN(3000))...)
	case 1:
		d.content = append(d.content, make([]byte, 512*random.IntN(3000))...)
	case 2:
		d.content = d.content[:len(d.content)-512*random.IntN(len(d.content)/2048)]
	case 3:
		clear(d.content[at:min(len(d.content), at+2*blockSize)])
	case 4:
	default:
		copy(d.content[at:], random.bytes(random.IntN(blockSize)))
	}

	d.content = d.content[:min(len(d.content), 10*blockSize)]
}
