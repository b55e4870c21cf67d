package main

import (
	"bytes"
	"context"
	"io"
	"sync/atomic"

	"github.com/alecthomas/kingpin/v2"
	"github.com/pkg/errors"

	"github.com/kopia/kopia/internal/gather"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/hashing"
	"github.com/kopia/kopia/repo/object"
)

// mostBlocks is how many equal blocks are written at a time: a large hole may take a device long.
const mostBlocks = 256

// restored says what a restore did to a device, in bytes: the rest is equal already, and was not written.
type restored struct {
	WrittenBytes int64 `json:"written_bytes"`
	ZeroedBytes  int64 `json:"zeroed_bytes"`
	KeptBytes    int64 `json:"kept_bytes"`
}

// attachBlockRead adds the subcommand block-read to a parser; action opens the repository, or has it open. Standard output
// has JSON lines: {"progress": …}, and {"result": …}.
func attachBlockRead(parser *kingpin.Application, action func(work) kingpin.Action) {
	command := parser.Command("block-read", "Write a snapshot of a device to a device (for the data mover)").Hidden()
	root := command.Flag("root", "Root object of the snapshot").Required().String()
	size := command.Flag("size", "Size of the device that was backed up, in bytes").Required().Int64()
	parallel := command.Flag("parallel", "Number of blocks at a time").Required().Int()
	compare := command.Flag("compare", "Write only what the device does not have").Bool()
	fd, deviceSize := deviceFlags(command)
	command.Action(action(func(ctx context.Context, rep repo.Repository, report *report) error {
		opened, err := openDevice(*fd, *deviceSize, true)
		if err != nil {
			return err
		}
		// The data mover syncs it, and may wait for its last user.
		defer opened.file.Close() //nolint:errcheck // nothing is buffered

		id, err := object.ParseID(*root)
		if err != nil {
			return errors.Wrap(err, "root object")
		}

		return restoreDevice(ctx, rep, id, *size, &blockReader{to: opened, parallel: *parallel, compare: *compare}, report)
	}))
}

// restoreDevice writes a device of that size; nothing is written unless the whole list of its blocks is valid.
func restoreDevice(ctx context.Context, rep repo.Repository, root object.ID, size int64, reader *blockReader, report *report) error {
	list, err := loadBlocks(ctx, rep, root)
	if err != nil {
		return err
	}

	if size <= 0 || blocks(size) > len(list) {
		return errors.Errorf("the list of blocks is for %v bytes, not %v", list.size(), size)
	}

	if size > reader.to.size {
		return errors.Errorf("the device is too small: it has %v bytes, the snapshot has %v", reader.to.size, size)
	}

	reader.rep, reader.report, reader.size, reader.list = rep, report, size, list[:blocks(size)]
	if reader.hasher, err = newBlockHasher(rep); err != nil {
		return err
	}

	runs := reader.list.runs()

	if err := inParallel(ctx, len(runs), reader.parallel, func(ctx context.Context, at int, buffer []byte) error {
		return reader.restoreRun(ctx, runs[at], buffer)
	}); err != nil {
		return err
	}

	report.stop()

	return report.write("result", &restored{reader.written.Load(), reader.zeroed.Load(), reader.kept.Load()})
}

// run is a range of equal blocks.
type run struct {
	first, count int
}

func (l blockList) runs() []run {
	var found []run

	for at, one := range l {
		if last := len(found) - 1; last >= 0 && l[at-1].Object == one.Object && found[last].count < mostBlocks {
			found[last].count++
		} else {
			found = append(found, run{at, 1})
		}
	}

	return found
}

// blockReader writes the blocks of a snapshot to a device.
type blockReader struct {
	rep      repo.Repository
	hasher   *blockHasher
	to       *device
	report   *report
	size     int64
	list     blockList
	parallel int
	compare  bool

	written, zeroed, kept atomic.Int64
}

// restoreRun reads the block once, and writes it wherever the run has it.
func (b *blockReader) restoreRun(ctx context.Context, which run, buffer []byte) error {
	start := int64(which.first) * blockSize
	end := min(start+int64(which.count)*blockSize, b.size)

	missing, err := b.findMissing(which, buffer)
	if err != nil {
		return err
	}

	if len(missing) == 0 {
		b.report.CachedFile("", end-start)

		return nil
	}

	content, err := b.readBlock(ctx, b.list[which.first].Object, buffer)
	if err != nil {
		return err
	}

	// What was read has been counted as such.
	defer b.report.CachedFile("", end-start-min(end-start, blockSize))

	if !b.compare && isZero(content) {
		b.zeroed.Add(end - start)

		return b.to.zero(start, end-start)
	}

	for _, at := range missing {
		if err := b.place(at, content); err != nil {
			return err
		}
	}

	return nil
}

// findMissing returns the blocks of a run that the device does not have. What it has is read and hashed, as kopia names
// the contents of blocks: the repository is not asked for what need not be written.
func (b *blockReader) findMissing(which run, buffer []byte) ([]int, error) {
	missing := make([]int, 0, which.count)

	for at := which.first; at < which.first+which.count; at++ {
		if b.compare {
			length := min(blockSize, b.size-int64(at)*blockSize)

			if err := b.to.read(at, buffer); err != nil {
				return nil, err
			}

			// What is stored beyond the end of the device are zeros.
			if clear(buffer[length:]); b.hasher.matches(buffer, b.list[at].Object) {
				b.kept.Add(length)

				continue
			}
		}

		missing = append(missing, at)
	}

	return missing, nil
}

func (b *blockReader) readBlock(ctx context.Context, id object.ID, buffer []byte) ([]byte, error) {
	reader, err := b.rep.OpenObject(ctx, id)
	if err != nil {
		return nil, errors.Wrapf(err, "open block %v", id)
	}
	defer reader.Close() //nolint:errcheck // it was only read

	if length := reader.Length(); length != blockSize {
		return nil, errors.Errorf("block %v has %v bytes", id, length)
	}

	_, err = io.ReadFull(reader, buffer)

	return buffer, errors.Wrapf(err, "read block %v", id)
}

func (b *blockReader) place(at int, content []byte) error {
	start := int64(at) * blockSize
	length := min(blockSize, b.size-start)
	content = content[:length]

	if isZero(content) {
		b.zeroed.Add(length)

		return b.to.zero(start, length)
	}

	b.written.Add(length)

	return b.to.write(start, content)
}

// blockHasher finds out whether an object has certain bytes, without reading it.
// Source: kopia 0.23.1, repo/content/content_manager.go (WriteContent).
type blockHasher struct {
	hash hashing.HashFunc
	zero []byte
}

func newBlockHasher(rep repo.Repository) (*blockHasher, error) {
	direct, ok := rep.(repo.DirectRepository)
	if !ok {
		return nil, errors.New("the repository is not connected directly")
	}

	hash := direct.ContentReader().ContentFormat().HashFunc()

	return &blockHasher{hash, hash(nil, gather.FromSlice(zeroBlock))}, nil
}

// matches returns whether an object has the content; not if it is in the older format that compresses objects.
func (h *blockHasher) matches(content []byte, id object.ID) bool {
	stored, _, direct := id.ContentID()
	if !direct {
		return false
	}

	if isZero(content) {
		return bytes.Equal(stored.Hash(), h.zero)
	}

	return bytes.Equal(stored.Hash(), h.hash(nil, gather.FromSlice(content)))
}
