package main

import (
	"context"
	"encoding/json"
	"io"

	"github.com/pkg/errors"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/compression"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/snapshotfs"
)

// A device is a file in the only directory of its snapshot. Its object is the list of its blocks, each an object of its own.
// Source: Velero main at d2241adba, pkg/repository/udmrepo/kopialib/lib_repo.go (kopiaObjectWriterEx, WriteMetadata),
// pkg/uploader/block/uploader.go (Backup).
const (
	blockSplitter      = "FIXED-1M"
	listSplitter       = "FIXED-128K"
	metadataCompressor = compression.Name("zstd-fastest")
	listStream         = "kopia:indirect"
	directoryStream    = "kopia:directory"
	rootDescription    = "bdev-root"
	permissions        = 0o777
)

// blockList has the object of each block of a device, in their order.
type blockList []object.IndirectObjectEntry

func newBlockList(count int) blockList {
	list := make(blockList, count)
	for at := range list {
		list[at] = object.IndirectObjectEntry{Start: int64(at) * blockSize, Length: blockSize}
	}

	return list
}

// size is that of the device, rounded up to a block.
func (l blockList) size() int64 { return int64(len(l)) * blockSize }

// check returns what is wrong with a list that somebody else may have written.
func (l blockList) check() error {
	for at, one := range l {
		if one.Start != int64(at)*blockSize || one.Length != blockSize {
			return errors.Errorf("entry %v of the list of blocks is for %v bytes at %v", at, one.Length, one.Start)
		}

		if _, _, direct := one.Object.ContentID(); !direct {
			return errors.Errorf("entry %v of the list of blocks has the object %v", at, one.Object)
		}
	}

	return nil
}

// encode writes the document entry by entry: as a whole, that of a device of 1 TiB would take some 300 MB.
func (l blockList) encode(to io.Writer) error {
	before := `{"stream":"` + listStream + `","entries":[`

	for _, one := range l {
		entry, err := json.Marshal(one)
		if err != nil {
			return err
		}

		if _, err := io.WriteString(to, before+string(entry)); err != nil {
			return err
		}

		before = ","
	}

	_, err := io.WriteString(to, "]}\n")

	return err
}

// writeBlock writes the content of one block.
func writeBlock(ctx context.Context, w repo.RepositoryWriter, content []byte, description string) (object.ID, error) {
	options := object.WriterOptions{Description: description, Splitter: blockSplitter}
	id, err := writeObject(ctx, w, options, func(to io.Writer) error {
		_, err := to.Write(content)

		return err
	})

	return id, errors.Wrap(err, "write a block")
}

func writeObject(
	ctx context.Context, w repo.RepositoryWriter, options object.WriterOptions, write func(io.Writer) error,
) (object.ID, error) {
	writer := w.NewObjectWriter(ctx, options)
	defer writer.Close() //nolint:errcheck // as its result says

	if err := write(writer); err != nil {
		return object.EmptyID, err
	}

	return writer.Result()
}

// writeRoot writes the directory of a device.
func writeRoot(ctx context.Context, w repo.RepositoryWriter, name string, content object.ID, size int64) (object.ID, error) {
	file := &snapshot.DirEntry{
		Name: name, Type: snapshot.EntryTypeFile, Permissions: permissions, FileSize: size, ModTime: noTime, ObjectID: content,
	}
	directory := &snapshot.DirManifest{StreamType: directoryStream, Entries: []*snapshot.DirEntry{file}}

	return snapshotfs.WriteDirManifest(ctx, w, rootDescription, directory, metadataCompressor)
}

// writeFile writes the list, and a directory whose only file has the blocks.
func (l blockList) writeFile(ctx context.Context, w repo.RepositoryWriter, name, description string) (object.ID, error) {
	list, err := writeObject(ctx, w, object.WriterOptions{
		Description: "LIST(" + description + ")", Prefix: "x", Compressor: metadataCompressor, Splitter: listSplitter,
	}, l.encode)
	if err != nil {
		return object.EmptyID, errors.Wrap(err, "write the list of blocks")
	}

	content, err := object.ParseID("I" + list.String())
	if err != nil {
		return object.EmptyID, err
	}

	return writeRoot(ctx, w, name, content, l.size())
}

// loadBlocks returns the list of the device whose directory is root.
func loadBlocks(ctx context.Context, rep repo.Repository, root object.ID) (list blockList, err error) {
	defer recovered(&err)

	directory := &snapshot.DirManifest{}
	if err := readJSON(ctx, rep, root, directory); err != nil {
		return nil, errors.Wrap(err, "read the directory")
	}

	if len(directory.Entries) != 1 || directory.Entries[0].Type != snapshot.EntryTypeFile {
		return nil, errors.New("it is not one of a block device: it does not hold a single file")
	}

	file := directory.Entries[0]

	index, ok := file.ObjectID.IndexObjectID()
	if !ok {
		return nil, errors.Errorf("the object %v is not a list of blocks", file.ObjectID)
	}

	if list, err = readList(ctx, rep, index); err != nil {
		return nil, errors.Wrap(err, "read the list of blocks")
	}

	if size := list.size(); size != file.FileSize {
		return nil, errors.Errorf("the list of blocks is for %v bytes, not %v", size, file.FileSize)
	}

	return list, list.check()
}

// recovered makes a panic of kopia, which takes it for granted that a list is not empty, an error.
func recovered(err *error) {
	if fault := recover(); fault != nil {
		*err = errors.Errorf("the list of blocks is damaged: %v", fault)
	}
}

func readJSON(ctx context.Context, rep repo.Repository, id object.ID, document any) error {
	reader, err := rep.OpenObject(ctx, id)
	if err != nil {
		return err
	}
	defer reader.Close() //nolint:errcheck // it was only read

	return json.NewDecoder(reader).Decode(document)
}

func readList(ctx context.Context, rep repo.Repository, id object.ID) (blockList, error) {
	reader, err := rep.OpenObject(ctx, id)
	if err != nil {
		return nil, err
	}
	defer reader.Close() //nolint:errcheck // it was only read

	return decodeList(reader)
}

// decodeList reads a document entry by entry, as encode writes it.
func decodeList(reader io.Reader) (list blockList, err error) {
	decoder := json.NewDecoder(reader)
	if err := expect(decoder, '{'); err != nil {
		return nil, err
	}

	for decoder.More() {
		key, err := decoder.Token()
		if err != nil {
			return nil, err
		}

		if key != "entries" {
			if err := decoder.Decode(new(json.RawMessage)); err != nil {
				return nil, err
			}

			continue
		}

		if list, err = decodeEntries(decoder, list); err != nil {
			return nil, err
		}
	}

	return list, expect(decoder, '}')
}

func decodeEntries(decoder *json.Decoder, list blockList) (blockList, error) {
	if err := expect(decoder, '['); err != nil {
		return nil, err
	}

	for decoder.More() {
		var one object.IndirectObjectEntry
		if err := decoder.Decode(&one); err != nil {
			return nil, err
		}

		list = append(list, one)
	}

	return list, expect(decoder, ']')
}

func expect(decoder *json.Decoder, wanted json.Delim) error {
	found, err := decoder.Token()
	if err == nil && found != wanted {
		err = errors.Errorf("%v instead of %v", found, wanted)
	}

	return err
}
