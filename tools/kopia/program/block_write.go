package main

import (
	"cmp"
	"context"
	"io"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pkg/errors"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/logging"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/upload"
)

// Source: Velero main at d2241adba, pkg/uploader/block/uploader.go, snapshot.go.
const (
	sourceSizeTag    = "bdev-source-size"
	blockDescription = "Block Uploader"
	startFormat      = "2006-01-02-15-04-05"
)

// checkedBlocks is how many blocks are read at least, if so many need not be read.
const checkedBlocks = 8

// noTime is the modification time of directory and file. Velero's is a time that kopia cannot represent.
var noTime = fs.UTCTimestampFromTime(time.Time{})

// blockDecision says how a device is backed up.
type blockDecision struct {
	// Parent is the snapshot that is compared with, or empty.
	Parent manifest.ID `json:"parent"`
	// Tags have their full names; that of the size is added.
	Tags     map[string]string `json:"tags"`
	Pins     []string          `json:"pins"`
	Parallel int               `json:"parallel"`
	// Changes says which blocks are to be read; without it all of them are. The others are those of the parent if it has
	// a base, which is the snapshot that the parent was made from, and otherwise zeros.
	Changes *changeQuery `json:"changes"`
	// Checkpoint of nil: none is saved.
	Checkpoint *checkpointDecision `json:"checkpoint"`
}

// blockOffer is what the repository has of a device, and the checkpoints of its backups.
type blockOffer struct {
	*offer

	Checkpoints []*snapshot.Manifest `json:"checkpoints,omitempty"`
}

// blockResult is the snapshot. ChangedBytes are of blocks that the parent does not have there, ParentFault is why it was not
// compared with, ChangesFault is why all blocks were read although changes were asked for, CheckpointFault is why nothing
// was taken from the checkpoint.
type blockResult struct {
	Snapshot     *snapshot.Manifest `json:"snapshot"`
	ChangedBytes int64              `json:"changed_bytes"`
	ReadBytes    int64              `json:"read_bytes"`
	ParentFault  string             `json:"parent_fault"`
	ChangesFault string             `json:"changes_fault"`
	// ResumedBytes were taken from a checkpoint.
	ResumedBytes    int64  `json:"resumed_bytes"`
	CheckpointFault string `json:"checkpoint_fault"`
}

// backUpDevice is the backup of a device by block.
func backUpDevice(
	ctx context.Context, rep repo.Repository, source snapshot.SourceInfo, from *device, decisions io.Reader, report *report,
) error {
	found, err := readOffer(ctx, rep, source)
	if err != nil {
		return err
	}

	checkpoints, err := findCheckpoints(ctx, rep, source)
	if err != nil {
		return err
	}

	decided := &blockDecision{}
	if err := decide(&blockOffer{found, checkpoints}, decisions, report, decided); err != nil {
		return err
	}

	session := repo.WriteSessionOptions{Purpose: "block-write", OnUpload: report.UploadedBytes}

	return repo.WriteSession(ctx, rep, session, func(ctx context.Context, w repo.RepositoryWriter) error {
		logging.Module("block-write")(ctx).Infof("Snapshotting %v ...", source)

		made, err := writeDevice(ctx, w, source, from, decided, report)
		if err != nil && (made == nil || made.Snapshot == nil || made.Snapshot.ID == "") {
			return errors.Wrap(err, "upload error")
		}

		report.stop()

		// As in carryOut: it may be in the repository.
		if err := report.write("result", made); err != nil {
			return err
		}

		return errors.Wrap(err, "upload error")
	})
}

// writeDevice writes all blocks and the snapshot, or with a checkpoint as result those before a signal.
func writeDevice(
	ctx context.Context, w repo.RepositoryWriter, source snapshot.SourceInfo, from *device, decided *blockDecision, report *report,
) (*blockResult, error) {
	made := &blockResult{}

	writer, err := newBlockWriter(ctx, w, source, from, decided, report, made)
	if err != nil {
		return nil, err
	}

	if writer.checkpoint != nil {
		// Once all blocks are read, a signal does not keep the snapshot from being written.
		cancelOnSignal(func() { writer.checkpoint.stopped.Store(true) })
	}

	if complete, err := writer.writeAll(ctx, decided); err != nil {
		return nil, err
	} else if !complete {
		made.Snapshot = writer.checkpoint.saved

		return made, nil
	}

	list := writer.list

	root, err := list.writeFile(ctx, w, writer.name, writer.description)
	if err != nil {
		return nil, err
	}

	made.ChangedBytes, made.ReadBytes = min(writer.changed.Load()*blockSize, from.size), from.readBytes.Load()
	made.Snapshot = buildManifest(source, root, list.size(), decided.Tags, decided.Pins)
	made.Snapshot.StartTime, made.Snapshot.EndTime = fs.UTCTimestampFromTime(writer.start), fs.UTCTimestampFromTime(w.Time())
	made.Snapshot.Tags[sourceSizeTag] = strconv.FormatInt(from.size, 10)

	return made, writer.saveSnapshot(ctx, made.Snapshot)
}

// newBlockWriter finds out what need not be read; what is doubtful about that is in the result.
func newBlockWriter(
	ctx context.Context, w repo.RepositoryWriter, source snapshot.SourceInfo, from *device, decided *blockDecision, report *report,
	made *blockResult,
) (*blockWriter, error) {
	hasher, err := newBlockHasher(w)
	if err != nil {
		return nil, err
	}

	name, start := objectName(source.Path), w.Time()
	writer := &blockWriter{
		w: w, hasher: hasher, from: from, report: report, list: newBlockList(blocks(from.size)), name: name, start: start,
		description: "BDEV:" + name + "-" + start.Format(startFormat), parentID: decided.Parent,
	}
	writer.zero = sync.OnceValues(func() (object.ID, error) { return writeBlock(ctx, w, zeroBlock, writer.description) })

	if decided.Parent != "" {
		if _, parent, err := loadDevice(ctx, w, decided.Parent); err != nil {
			made.ParentFault = err.Error()
		} else {
			writer.parent = parent
		}
	}

	if err := writer.ask(ctx, decided.Changes, made.ParentFault); err != nil {
		made.ChangesFault = err.Error()
	}

	if decided.Checkpoint == nil {
		return writer, nil
	}

	// What stays, the next backup finds.
	if abandoned, err := findAbandoned(ctx, w, start); err == nil {
		decided.Checkpoint.Replaces = append(decided.Checkpoint.Replaces, abandoned...)
	}

	if id := decided.Checkpoint.Resume; id != "" {
		if err := writer.resume(ctx, id); err != nil {
			made.CheckpointFault = err.Error()
		}
	}

	made.ResumedBytes = min(int64(writer.resumed)*blockSize, from.size)
	writer.checkpoint = &checkpointer{
		writer: writer, decided: decided.Checkpoint, of: source, end: writer.resumed, beyond: map[int]struct{}{},
	}

	return writer, nil
}

// writeAll writes all blocks, and returns false if a signal ended that: then there is a checkpoint.
func (b *blockWriter) writeAll(ctx context.Context, decided *blockDecision) (bool, error) {
	if b.checkpoint == nil {
		return true, inParallel(ctx, len(b.list), decided.Parallel, b.writeOne)
	}

	ticker := time.NewTicker(max(time.Millisecond, time.Duration(decided.Checkpoint.Seconds*float64(time.Second))))
	defer ticker.Stop()

	end := b.checkpoint.saveEach(ctx, ticker.C)
	err := inParallel(ctx, len(b.list), decided.Parallel, b.writeOne)

	end()

	if err != nil || b.checkpoint.done() == len(b.list) {
		return true, err
	}

	if err := b.checkpoint.save(ctx, upload.IncompleteReasonCanceled); err != nil {
		return false, err
	}

	if b.checkpoint.saved == nil {
		return false, errors.New("canceled before the first block was read")
	}

	return false, nil
}

// saveSnapshot writes the manifest, and deletes all checkpoints by the same write.
func (b *blockWriter) saveSnapshot(ctx context.Context, made *snapshot.Manifest) error {
	if _, err := snapshot.SaveSnapshot(ctx, b.w, made); err != nil {
		return errors.Wrap(err, "cannot save manifest")
	}

	if b.checkpoint != nil {
		if err := b.checkpoint.discard(ctx); err != nil {
			return err
		}
	}

	return errors.Wrap(b.w.Flush(ctx), "flush error")
}

// buildManifest returns the manifest as Velero writes it.
// Source: Velero main at d2241adba, pkg/repository/udmrepo/kopialib/lib_repo.go (SaveSnapshot).
func buildManifest(
	source snapshot.SourceInfo, root object.ID, size int64, tags map[string]string, pins []string,
) *snapshot.Manifest {
	made := &snapshot.Manifest{
		Source:      source,
		Description: blockDescription,
		Stats:       snapshot.Stats{TotalFileSize: size},
		RootEntry: &snapshot.DirEntry{
			Type:        snapshot.EntryTypeDirectory,
			ObjectID:    root,
			ModTime:     noTime,
			Permissions: permissions,
			DirSummary:  &fs.DirectorySummary{TotalFileSize: size},
		},
		Tags: map[string]string{},
		Pins: pins,
	}

	for key, value := range tags {
		made.Tags[key] = value
	}

	return made
}

// objectName returns the name of the file that has the device.
// Source: Velero main at d2241adba, pkg/uploader/block/uploader.go (getObjectName).
func objectName(path string) string {
	return strings.Trim(strings.NewReplacer("/", "-", "\\", "-").Replace(path), "-")
}

// loadDevice returns a snapshot of a device, and its blocks.
func loadDevice(ctx context.Context, rep repo.Repository, id manifest.ID) (*snapshot.Manifest, blockList, error) {
	found, err := snapshot.LoadSnapshot(ctx, rep, id)
	if err != nil {
		return nil, nil, err
	}

	if found.RootEntry == nil {
		return nil, nil, errors.New("it has no directory")
	}

	list, err := loadBlocks(ctx, rep, found.RootEntry.ObjectID)

	return found, list, err
}

// blockWriter writes the blocks of a device, and counts those that its parent does not have.
type blockWriter struct {
	w           repo.RepositoryWriter
	hasher      *blockHasher
	from        *device
	report      *report
	list        blockList
	parentID    manifest.ID
	parent      blockList
	name        string
	start       time.Time
	description string
	zero        func() (object.ID, error)
	changed     atomic.Int64

	// marked are the blocks to read; nil: all of them. based: the others are those of the parent, not zeros.
	marked *markedBlocks
	based  bool

	// resumed is how many blocks, from the first one, are in the list already; checkpoint of nil: none is saved.
	resumed    int
	checkpoint *checkpointer
}

// ask finds out which blocks are to be read; after an error all of them are. The fault is why the parent was not loaded.
func (b *blockWriter) ask(ctx context.Context, changes *changeQuery, fault string) error {
	if changes == nil {
		return nil
	}

	if b.based = changes.Base != ""; b.based {
		if b.parent == nil {
			return errors.New("the parent: " + cmp.Or(fault, "there is none"))
		}

		if err := b.parent.verify(ctx, b.w); err != nil {
			return errors.Wrap(err, "the parent")
		}
	}

	marked, err := changes.ask(ctx, b.from.size)
	if err != nil {
		return err
	}

	// What a driver says about the end of a device that has another size now need not be what the list needs: its last
	// block is filled up with zeros.
	marked.from(len(b.list) - 1)

	if b.based {
		marked.from(len(b.parent) - 1)
	}

	expected := func(at int) (object.ID, bool, error) {
		if marked.set[at] {
			return object.EmptyID, false, nil
		}

		id, err := b.unread(at)

		return id, true, err
	}

	differs, err := b.checkSome(ctx, len(b.list), max(1, blocks(marked.end)), expected)
	if err != nil {
		return err
	}

	if differs >= 0 {
		return errors.Errorf("it does not name the bytes at %v, which have changed", int64(differs)*blockSize)
	}

	b.marked = marked

	return nil
}

// checkSome reads some of so many blocks that need not be read, and returns the first one that is not as expected, or -1: a
// driver that misses changes, or another device, is likely to differ in one of these. A file system in use changes the first
// block. What a list that ended early lacks is beyond its end, often right there: each second one is, beginning with that.
func (b *blockWriter) checkSome(
	ctx context.Context, count, end int, expected func(at int) (object.ID, bool, error),
) (int, error) {
	buffer, at := make([]byte, blockSize), 0

	for checked, tried := 0, 0; checked < checkedBlocks && tried < 16*checkedBlocks; tried++ {
		want, unread, err := expected(at)
		if err != nil {
			return 0, err
		}

		if unread {
			found, _, err := b.store(ctx, at, buffer)
			if err != nil {
				return 0, err
			}

			if found != want {
				return at, nil
			}

			checked++
		}

		switch {
		case tried == 0 && end < count:
			at = end
		case tried%2 == 0 && end < count:
			at = end + rand.IntN(count-end) //nolint:gosec // no secret
		default:
			at = rand.IntN(count) //nolint:gosec // no secret
		}
	}

	return -1, nil
}

// unread returns the object of a block that is not read.
func (b *blockWriter) unread(at int) (object.ID, error) {
	if b.based {
		return b.parent[at].Object, nil
	}

	return b.zero()
}

func (b *blockWriter) writeOne(ctx context.Context, at int, buffer []byte) error {
	if b.checkpoint != nil && b.checkpoint.stopped.Load() {
		return nil
	}

	var (
		id     object.ID
		hashed bool
		err    error
	)

	switch {
	case at < b.resumed:
		// The list is being read for a checkpoint.
	case b.marked == nil || b.marked.set[at]:
		id, hashed, err = b.store(ctx, at, buffer)
	default:
		id, err = b.unread(at)
	}

	if err != nil {
		return err
	}

	if hashed {
		b.report.HashedBytes(blockSize)
	} else {
		b.report.CachedFile("", blockSize)
	}

	if at >= b.resumed {
		b.list[at].Object = id
	}

	if b.hasChanged(at, hashed) {
		b.changed.Add(1)
	}

	if b.checkpoint != nil && at >= b.resumed {
		b.checkpoint.finish(at)
	}

	return nil
}

// hasChanged returns whether the parent does not have the block there. Beyond its end there was nothing.
func (b *blockWriter) hasChanged(at int, hashed bool) bool {
	id := b.list[at].Object
	if at < len(b.parent) {
		return b.parent[at].Object != id
	}

	return hashed || at < b.resumed && !b.hasher.matches(zeroBlock, id)
}

// store reads a block, and returns its object, and whether that is not one of zeros.
func (b *blockWriter) store(ctx context.Context, at int, buffer []byte) (id object.ID, hashed bool, err error) {
	if err = b.from.read(at, buffer); err != nil {
		return id, false, err
	}

	if isZero(buffer) {
		id, err = b.zero()

		return id, false, err
	}

	id, err = writeBlock(ctx, b.w, buffer, b.description)

	return id, true, err
}
