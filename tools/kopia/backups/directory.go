package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/kopia/kopia/repo/blob"
)

const (
	directoryType = "directory"

	// Blobs are listed by kind: after each index blob kopia lists all of them again.
	kindLength = 2
)

// directoryOptions names the directory in which an S3 server keeps the blobs of a repository.
type directoryOptions struct {
	Path string `json:"path"`
}

// directory is the storage of an S3 server, past the server: each blob is a file of the same name, whose modification
// time is by our clock. What others write after it was opened is not seen.
type directory struct {
	blob.DefaultProviderImplementation

	options directoryOptions
	now     func() time.Time

	mu    sync.Mutex
	known map[blob.ID]map[blob.ID]blob.Metadata
}

// registerDirectory lets configurations have this type of storage.
func registerDirectory(now func() time.Time) {
	blob.AddSupportedStorage(directoryType, directoryOptions{}, func(_ context.Context, options *directoryOptions, _ bool) (blob.Storage, error) {
		d := &directory{options: *options, now: now, known: map[blob.ID]map[blob.ID]blob.Metadata{}}
		return d, d.load()
	})
}

func (d *directory) load() error {
	entries, err := os.ReadDir(d.options.Path)
	if err != nil {
		return err
	}

	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil {
			return err
		}

		d.note(blob.Metadata{BlobID: blob.ID(entry.Name()), Length: info.Size(), Timestamp: info.ModTime()})
	}

	return nil
}

func (d *directory) note(bm blob.Metadata) {
	kind := kindOf(bm.BlobID)
	if d.known[kind] == nil {
		d.known[kind] = map[blob.ID]blob.Metadata{}
	}

	d.known[kind][bm.BlobID] = bm
}

func kindOf(id blob.ID) blob.ID {
	return id[:min(len(id), kindLength)]
}

func (d *directory) path(id blob.ID) string {
	return filepath.Join(d.options.Path, string(id))
}

func (d *directory) GetBlob(_ context.Context, id blob.ID, offset, length int64, output blob.OutputBuffer) error {
	output.Reset()

	data, err := os.ReadFile(d.path(id))
	if os.IsNotExist(err) {
		return blob.ErrBlobNotFound
	}

	if err != nil {
		return err
	}

	if length >= 0 {
		if offset < 0 || offset+length > int64(len(data)) {
			return blob.ErrInvalidRange
		}

		data = data[offset : offset+length]
	}

	if _, err := output.Write(data); err != nil {
		return err
	}

	return blob.EnsureLengthExactly(output.Length(), length)
}

func (d *directory) GetMetadata(_ context.Context, id blob.ID) (blob.Metadata, error) {
	d.mu.Lock()
	defer d.mu.Unlock()

	if bm, found := d.known[kindOf(id)][id]; found {
		return bm, nil
	}

	return blob.Metadata{}, blob.ErrBlobNotFound
}

func (d *directory) ListBlobs(_ context.Context, prefix blob.ID, callback func(blob.Metadata) error) error {
	for _, bm := range d.listed(prefix) {
		if err := callback(bm); err != nil {
			return err
		}
	}

	return nil
}

// listed returns the blobs with the prefix; the callback of a list may write.
func (d *directory) listed(prefix blob.ID) []blob.Metadata {
	d.mu.Lock()
	defer d.mu.Unlock()

	var found []blob.Metadata

	for kind, blobs := range d.known {
		if !strings.HasPrefix(string(kind), string(kindOf(prefix))) {
			continue
		}

		for id, bm := range blobs {
			if strings.HasPrefix(string(id), string(prefix)) {
				found = append(found, bm)
			}
		}
	}

	return found
}

func (d *directory) PutBlob(_ context.Context, id blob.ID, data blob.Bytes, options blob.PutOptions) error {
	file, err := os.CreateTemp(filepath.Dir(d.options.Path), "part-")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name()) //nolint:errcheck

	length, err := data.WriteTo(file)
	if closed := file.Close(); err == nil {
		err = closed
	}

	if err != nil {
		return err
	}

	now := d.now()
	if err := os.Chtimes(file.Name(), now, now); err != nil {
		return err
	}

	if err := os.Rename(file.Name(), d.path(id)); err != nil {
		return err
	}

	if options.GetModTime != nil {
		*options.GetModTime = now
	}

	d.mu.Lock()
	defer d.mu.Unlock()

	d.note(blob.Metadata{BlobID: id, Length: length, Timestamp: now})

	return nil
}

func (d *directory) DeleteBlob(_ context.Context, id blob.ID) error {
	d.mu.Lock()
	defer d.mu.Unlock()

	delete(d.known[kindOf(id)], id)

	if err := os.Remove(d.path(id)); err != nil && !os.IsNotExist(err) {
		return err
	}

	return nil
}

func (d *directory) ConnectionInfo() blob.ConnectionInfo {
	return blob.ConnectionInfo{Type: directoryType, Config: &d.options}
}

func (d *directory) DisplayName() string {
	return "directory " + d.options.Path
}
