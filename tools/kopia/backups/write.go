package main

import (
	"context"
	"fmt"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/snapshotfs"
)

// Where each snapshot has the files that later ones have, too.
const baseName = "base"

// write writes one snapshot of each source, each in a session of its own.
func (h *helper) write(ctx context.Context, rep repo.DirectRepository, wanted *backup) ([]manifest.ID, error) {
	written := make([]manifest.ID, 0, len(wanted.Sources))

	for _, source := range wanted.Sources {
		err := repo.WriteSession(ctx, rep, repo.WriteSessionOptions{Purpose: "backup"}, func(ctx context.Context, w repo.RepositoryWriter) error {
			id, err := h.writeSnapshot(ctx, w, wanted, source)
			written = append(written, id)

			return err
		})
		if err != nil {
			return nil, err
		}
	}

	return written, nil
}

func (h *helper) writeSnapshot(ctx context.Context, rep repo.RepositoryWriter, wanted *backup, source string) (manifest.ID, error) {
	if wanted.BaseFiles > 0 {
		files, err := h.writeFiles(ctx, rep, "", wanted.BaseFiles, wanted.Bytes)
		if err != nil {
			return "", err
		}

		if h.bases[source], err = writeDirectory(ctx, rep, files); err != nil {
			return "", err
		}
	}

	entries := []*snapshot.DirEntry{}

	for round := range wanted.Rounds {
		files, err := h.writeFiles(ctx, rep, fmt.Sprintf("%d-", round), wanted.Files, wanted.Bytes)
		if err != nil {
			return "", err
		}

		entries = append(entries, files...)

		if err := rep.Flush(ctx); err != nil {
			return "", err
		}
	}

	if base, found := h.bases[source]; found {
		entries = append(entries, entry(baseName, snapshot.EntryTypeDirectory, base, 0))
	}

	root, err := writeDirectory(ctx, rep, entries)
	if err != nil {
		return "", err
	}

	options := rep.ClientOptions()
	now := fs.UTCTimestampFromTime(rep.Time())

	return snapshot.SaveSnapshot(ctx, rep, &snapshot.Manifest{
		Source:    snapshot.SourceInfo{Host: options.Hostname, UserName: options.Username, Path: source},
		StartTime: now,
		EndTime:   now,
		RootEntry: entry(source, snapshot.EntryTypeDirectory, root, 0),
	})
}

func (h *helper) writeFiles(ctx context.Context, rep repo.RepositoryWriter, prefix string, count, size int) ([]*snapshot.DirEntry, error) {
	entries := make([]*snapshot.DirEntry, 0, count)
	data := make([]byte, size)

	for i := range count {
		if _, err := h.random.Read(data); err != nil {
			return nil, err
		}

		id, err := writeObject(ctx, rep, data)
		if err != nil {
			return nil, err
		}

		entries = append(entries, entry(fmt.Sprintf("%s%08d", prefix, i), snapshot.EntryTypeFile, id, int64(size)))
	}

	return entries, nil
}

func writeObject(ctx context.Context, rep repo.RepositoryWriter, data []byte) (object.ID, error) {
	writer := rep.NewObjectWriter(ctx, object.WriterOptions{})
	defer writer.Close() //nolint:errcheck

	if _, err := writer.Write(data); err != nil {
		return object.EmptyID, err
	}

	return writer.Result()
}

func writeDirectory(ctx context.Context, rep repo.RepositoryWriter, entries []*snapshot.DirEntry) (object.ID, error) {
	content := &snapshot.DirManifest{StreamType: "kopia:directory", Entries: entries}

	return snapshotfs.WriteDirManifest(ctx, rep, "", content, "")
}

func entry(name string, kind snapshot.EntryType, id object.ID, size int64) *snapshot.DirEntry {
	made := &snapshot.DirEntry{Name: name, Type: kind, ObjectID: id, FileSize: size}
	if kind == snapshot.EntryTypeDirectory {
		made.DirSummary = &fs.DirectorySummary{TotalDirCount: 1}
	}

	return made
}

// remove deletes the snapshots, as `kopia snapshot delete` does.
func remove(ctx context.Context, rep repo.DirectRepository, snapshots []manifest.ID) error {
	return repo.WriteSession(ctx, rep, repo.WriteSessionOptions{Purpose: "delete"}, func(ctx context.Context, w repo.RepositoryWriter) error {
		for _, id := range snapshots {
			if err := w.DeleteManifest(ctx, id); err != nil {
				return err
			}
		}

		return nil
	})
}
