package main

import (
	"bufio"
	"context"
	"io"
	"os"
	"sort"
	"strconv"
	"strings"

	"github.com/alecthomas/kingpin/v2"
	"github.com/pkg/errors"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/object"
)

// mostFetched is how many blocks one request may ask for, fetchParallel how many are read at a time, and mostPart the
// length of a part of a file: kopia makes none longer than 16 MiB.
const (
	mostFetched   = 1024
	fetchParallel = 8
	mostPart      = 64 << 20
)

// attachBlockFetch adds the subcommand block-fetch: each line of standard input has the number of a block and how many to
// fetch from there; standard output has a JSON line {"fetched": …} once the file beside has them.
func attachBlockFetch(parser *kingpin.Application) {
	command := parser.Command("block-fetch", "Copy the blocks that standard input names of a stored file to a file (for the data mover)").Hidden()
	stored := command.Flag("object", "Object of the stored file").Required().String()
	fd, size := deviceFlags(command)
	command.Action(opener{parser}.action(func(ctx context.Context, rep repo.Repository, report *report) error {
		opened, err := openDevice(*fd, *size, true)
		if err != nil {
			return err
		}

		id, err := object.ParseID(*stored)
		if err != nil {
			return errors.Wrap(err, "object")
		}

		return fetchBlocks(ctx, rep, id, opened, os.Stdin, report)
	}))
}

// fetchBlocks answers requests until their end. The file has the size of what is stored, and only zeros where nothing was
// fetched.
func fetchBlocks(ctx context.Context, rep repo.Repository, id object.ID, to *device, requests io.Reader, report *report) error {
	report.stop()

	parts, err := loadParts(ctx, rep, id, to.size)
	if err != nil {
		return err
	}

	fetcher := &blockFetcher{rep, parts, to}

	lines := bufio.NewScanner(requests)
	for lines.Scan() {
		first, count, err := parseRequest(lines.Text(), blocks(to.size))
		if err != nil {
			return err
		}

		if err := inParallel(ctx, count, fetchParallel, func(ctx context.Context, at int, buffer []byte) error {
			return fetcher.fetch(ctx, first+at, buffer)
		}); err != nil {
			return err
		}

		if err := report.write("fetched", count); err != nil {
			return err
		}
	}

	return errors.Wrap(lines.Err(), "read the requests")
}

// parseRequest returns the first block and the number of blocks that a line asks for, all of them among that many.
func parseRequest(line string, total int) (first, count int, err error) {
	words := strings.Fields(line)
	if len(words) == 2 {
		var firstErr, countErr error

		first, firstErr = strconv.Atoi(words[0])
		count, countErr = strconv.Atoi(words[1])

		if firstErr == nil && countErr == nil && first >= 0 && count > 0 && count <= mostFetched && count <= total-first {
			return first, count, nil
		}
	}

	return 0, 0, errors.Errorf("%q does not name blocks of %v", line, total)
}

// loadParts returns the objects that a stored file of at least that size consists of, in their order.
func loadParts(ctx context.Context, rep repo.Repository, id object.ID, size int64) (parts blockList, err error) {
	defer recovered(&err)

	index, indirect := id.IndexObjectID()
	if !indirect {
		return blockList{{Length: size, Object: id}}, nil
	}

	if parts, err = readList(ctx, rep, index); err != nil {
		return nil, errors.Wrap(err, "read the list of blocks")
	}

	var end int64

	for at, one := range parts {
		if one.Start != end || one.Length <= 0 || one.Length > mostPart {
			return nil, errors.Errorf("entry %v of the list of blocks is for %v bytes at %v", at, one.Length, one.Start)
		}

		end += one.Length
	}

	if end < size {
		return nil, errors.Errorf("the list of blocks is for %v bytes, not %v", end, size)
	}

	return parts, nil
}

// blockFetcher copies blocks of a stored file, whatever its parts are: a device by block, or a stream.
type blockFetcher struct {
	rep   repo.Repository
	parts blockList
	to    *device
}

func (f *blockFetcher) fetch(ctx context.Context, block int, buffer []byte) error {
	start := int64(block) * blockSize
	end := min(start+blockSize, f.to.size)
	content := buffer[:end-start]
	at := sort.Search(len(f.parts), func(at int) bool { return f.parts[at].Start+f.parts[at].Length > start })

	for rest := content; len(rest) > 0; at++ {
		offset := end - int64(len(rest))
		piece := rest[:min(int64(len(rest)), f.parts[at].Start+f.parts[at].Length-offset)]

		if err := readPart(ctx, f.rep, f.parts[at], offset-f.parts[at].Start, piece); err != nil {
			return errors.Wrapf(err, "read block %v", block)
		}

		rest = rest[len(piece):]
	}

	if isZero(content) {
		return nil
	}

	return f.to.write(start, content)
}

// readPart reads a piece of a part of a stored file.
func readPart(ctx context.Context, rep repo.Repository, part object.IndirectObjectEntry, offset int64, piece []byte) (err error) {
	defer recovered(&err)

	reader, err := rep.OpenObject(ctx, part.Object)
	if err != nil {
		return err
	}
	defer reader.Close() //nolint:errcheck // it was only read

	if length := reader.Length(); length < part.Length {
		return errors.Errorf("object %v has %v bytes, not %v", part.Object, length, part.Length)
	}

	if _, err := reader.Seek(offset, io.SeekStart); err != nil {
		return err
	}

	_, err = io.ReadFull(reader, piece)

	return err
}
