package main

import (
	"context"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alecthomas/kingpin/v2"
	"github.com/pkg/errors"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/logging"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
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
}

// blockResult is the snapshot. ChangedBytes are of blocks that the parent does not have there, ParentFault is why it was not
// compared with, ChangesFault is why all blocks were read although changes were asked for.
type blockResult struct {
	Snapshot     *snapshot.Manifest `json:"snapshot"`
	ChangedBytes int64              `json:"changed_bytes"`
	ReadBytes    int64              `json:"read_bytes"`
	ParentFault  string             `json:"parent_fault"`
	ChangesFault string             `json:"changes_fault"`
}

// attachBlockWrite adds the subcommand block-write, whose dialogue is that of mover-backup.
func attachBlockWrite(parser *kingpin.Application) {
	command := parser.Command("block-write", "Back up a device as standard input decides (for the data mover)").Hidden()
	source := command.Flag("source", "Source, as user@host:path").Required().String()
	fd, size := deviceFlags(command)
	command.Action(opener{parser}.action(func(ctx context.Context, rep repo.Repository, report *report) error {
		opened, err := openDevice(*fd, *size, false)
		if err != nil {
			return err
		}

		parsed, err := parseSource(rep, *source)
		if err != nil {
			return err
		}

		return backUpDevice(ctx, rep, parsed, opened, os.Stdin, report)
	}))
}

func deviceFlags(command *kingpin.CmdClause) (*int, *int64) {
	return command.Flag("device-fd", "Inherited descriptor of the device").Required().Int(),
		command.Flag("device-size", "Size of the device, in bytes").Required().Int64()
}

func backUpDevice(
	ctx context.Context, rep repo.Repository, source snapshot.SourceInfo, from *device, decisions io.Reader, report *report,
) error {
	decided := &blockDecision{}
	if err := decide(ctx, rep, source, decisions, report, decided); err != nil {
		return err
	}

	session := repo.WriteSessionOptions{Purpose: "block-write", OnUpload: report.UploadedBytes}

	return repo.WriteSession(ctx, rep, session, func(ctx context.Context, w repo.RepositoryWriter) error {
		logging.Module("block-write")(ctx).Infof("Snapshotting %v ...", source)

		made, err := writeDevice(ctx, w, source, from, decided, report)
		if err != nil {
			return errors.Wrap(err, "upload error")
		}

		if _, err := snapshot.SaveSnapshot(ctx, w, made.Snapshot); err != nil {
			return errors.Wrap(err, "cannot save manifest")
		}

		if err := w.Flush(ctx); err != nil {
			return errors.Wrap(err, "flush error")
		}

		report.stop()

		return report.write("result", made)
	})
}

// writeDevice writes all blocks, and returns the manifest, which is not saved yet.
func writeDevice(
	ctx context.Context, w repo.RepositoryWriter, source snapshot.SourceInfo, from *device, decided *blockDecision, report *report,
) (*blockResult, error) {
	made, start := &blockResult{}, w.Time()
	name := objectName(source.Path)
	writer := &blockWriter{
		w: w, from: from, report: report, list: newBlockList(blocks(from.size)),
		description: "BDEV:" + name + "-" + start.Format(startFormat),
	}
	writer.zero = sync.OnceValues(func() (object.ID, error) { return writeBlock(ctx, w, zeroBlock, writer.description) })

	if decided.Parent != "" {
		parent, err := loadParent(ctx, w, decided.Parent)
		if err != nil {
			made.ParentFault = err.Error()
		}

		writer.parent = parent
	}

	if err := writer.ask(ctx, decided.Changes); err != nil {
		made.ChangesFault = err.Error()
	}

	if err := inParallel(ctx, len(writer.list), decided.Parallel, writer.writeOne); err != nil {
		return nil, err
	}

	content, err := writer.list.write(ctx, w, writer.description)
	if err != nil {
		return nil, err
	}

	size := writer.list.size()

	root, err := writeRoot(ctx, w, name, content, size)
	if err != nil {
		return nil, err
	}

	made.ChangedBytes, made.ReadBytes = min(writer.changed.Load()*blockSize, from.size), from.readBytes.Load()
	made.Snapshot = buildManifest(source, root, size, decided)
	made.Snapshot.StartTime, made.Snapshot.EndTime = fs.UTCTimestampFromTime(start), fs.UTCTimestampFromTime(w.Time())
	made.Snapshot.Tags[sourceSizeTag] = strconv.FormatInt(from.size, 10)

	return made, nil
}

// buildManifest returns the manifest as Velero writes it.
// Source: Velero main at d2241adba, pkg/repository/udmrepo/kopialib/lib_repo.go (SaveSnapshot).
func buildManifest(source snapshot.SourceInfo, root object.ID, size int64, decided *blockDecision) *snapshot.Manifest {
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
		Pins: decided.Pins,
	}

	for key, value := range decided.Tags {
		made.Tags[key] = value
	}

	return made
}

// objectName returns the name of the file that has the device.
// Source: Velero main at d2241adba, pkg/uploader/block/uploader.go (getObjectName).
func objectName(path string) string {
	return strings.Trim(strings.NewReplacer("/", "-", "\\", "-").Replace(path), "-")
}

func loadParent(ctx context.Context, rep repo.Repository, id manifest.ID) (blockList, error) {
	found, err := snapshot.LoadSnapshot(ctx, rep, id)
	if err != nil {
		return nil, err
	}

	if found.RootEntry == nil {
		return nil, errors.New("it has no directory")
	}

	return loadBlocks(ctx, rep, found.RootEntry.ObjectID)
}

// blockWriter writes the blocks of a device, and counts those that its parent does not have.
type blockWriter struct {
	w           repo.RepositoryWriter
	from        *device
	report      *report
	list        blockList
	parent      blockList
	description string
	zero        func() (object.ID, error)
	changed     atomic.Int64

	// marked are the blocks to read; nil: all of them. based: the others are those of the parent, not zeros.
	marked *markedBlocks
	based  bool
}

// ask finds out which blocks are to be read; after an error all of them are.
func (b *blockWriter) ask(ctx context.Context, changes *changeQuery) error {
	if changes == nil {
		return nil
	}

	if b.based = changes.Base != ""; b.based && b.parent == nil {
		return errors.New("there is no parent to take blocks from")
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

	if err := b.checkSome(ctx, marked); err != nil {
		return err
	}

	b.marked = marked

	return nil
}

// checkSome reads some blocks that need not be read: a driver that misses changes is likely to miss one of these. A file
// system in use changes the first one.
func (b *blockWriter) checkSome(ctx context.Context, marked *markedBlocks) error {
	buffer, at := make([]byte, blockSize), 0

	for checked, tried := 0, 0; checked < checkedBlocks && tried < 16*checkedBlocks; tried++ {
		if !marked.set[at] {
			expected, err := b.unread(at)
			if err != nil {
				return err
			}

			found, _, err := b.store(ctx, at, buffer)
			if err != nil {
				return err
			}

			if found != expected {
				return errors.Errorf("it does not name the bytes at %v, which have changed", int64(at)*blockSize)
			}

			checked++
		}

		at = rand.IntN(len(marked.set)) //nolint:gosec // no secret
	}

	return nil
}

// unread returns the object of a block that is not read.
func (b *blockWriter) unread(at int) (object.ID, error) {
	if b.based {
		return b.parent[at].Object, nil
	}

	return b.zero()
}

func (b *blockWriter) writeOne(ctx context.Context, at int, buffer []byte) error {
	var (
		id     object.ID
		hashed bool
		err    error
	)

	if b.marked == nil || b.marked.set[at] {
		id, hashed, err = b.store(ctx, at, buffer)
	} else {
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

	b.list[at].Object = id

	// Beyond the end of the parent there was nothing.
	if at < len(b.parent) && b.parent[at].Object != id || at >= len(b.parent) && hashed {
		b.changed.Add(1)
	}

	return nil
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
