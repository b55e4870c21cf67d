package main

import (
	"context"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/blob"
	"github.com/kopia/kopia/repo/content"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/snapshotfs"
)

// tracked are contents that only deleted snapshots held, with their length in a pack and all packs that had them:
// maintenance moves them before it drops them.
type tracked map[content.ID]*trackedContent

type trackedContent struct {
	bytes int64
	packs map[blob.ID]bool
}

// add tracks what the given snapshots hold and no other one does, and returns the bytes.
func (t tracked) add(ctx context.Context, rep repo.DirectRepository, snapshots []manifest.ID) (int64, error) {
	going := map[manifest.ID]bool{}
	for _, id := range snapshots {
		going[id] = true
	}

	all, err := snapshot.ListSnapshotManifests(ctx, rep, nil, nil)
	if err != nil {
		return 0, err
	}

	var staying []manifest.ID
	for _, id := range all {
		if !going[id] {
			staying = append(staying, id)
		}
	}

	kept, err := contentsOf(ctx, rep, staying)
	if err != nil {
		return 0, err
	}

	held, err := contentsOf(ctx, rep, snapshots)
	if err != nil {
		return 0, err
	}

	bytes := int64(0)
	for id := range held {
		if kept[id] {
			continue
		}

		info, err := rep.ContentInfo(ctx, id)
		if err != nil {
			return 0, err
		}

		t[id] = &trackedContent{int64(info.PackedLength), map[blob.ID]bool{info.PackBlobID: true}}
		bytes += int64(info.PackedLength)
	}

	return bytes, nil
}

// stored returns the bytes of those contents that a pack in the bucket still has, also if no index names them.
func (t tracked) stored(ctx context.Context, rep repo.DirectRepository) (int64, error) {
	err := rep.ContentReader().IterateContents(ctx, content.IterateOptions{IncludeDeleted: true}, func(info content.Info) error {
		if found := t[info.ContentID]; found != nil {
			found.packs[info.PackBlobID] = true
		}

		return nil
	})
	if err != nil {
		return 0, err
	}

	present := map[blob.ID]bool{}
	for _, prefix := range content.PackBlobIDPrefixes {
		err := rep.BlobReader().ListBlobs(ctx, prefix, func(bm blob.Metadata) error {
			present[bm.BlobID] = true
			return nil
		})
		if err != nil {
			return 0, err
		}
	}

	bytes := int64(0)
	for _, one := range t {
		for pack := range one.packs {
			if present[pack] {
				bytes += one.bytes
				break
			}
		}
	}

	return bytes, nil
}

// contentsOf returns the contents of the snapshots: all that snapshot-gc would find in use.
// Source: kopia 0.23.1, snapshot/snapshotgc/gc.go.
func contentsOf(ctx context.Context, rep repo.DirectRepository, snapshots []manifest.ID) (map[content.ID]bool, error) {
	manifests, err := snapshot.LoadSnapshots(ctx, rep, snapshots)
	if err != nil {
		return nil, err
	}

	found := map[content.ID]bool{}

	// The walker calls back from one goroutine if it has no others.
	walker, err := snapshotfs.NewTreeWalker(ctx, snapshotfs.TreeWalkerOptions{
		Parallelism: 1,
		EntryCallback: func(ctx context.Context, _ fs.Entry, oid object.ID, _ string) error {
			contents, err := rep.VerifyObject(ctx, oid)
			for _, id := range contents {
				found[id] = true
			}

			return err
		},
	})
	if err != nil {
		return nil, err
	}
	defer walker.Close(ctx)

	for _, one := range manifests {
		root, err := snapshotfs.SnapshotRoot(rep, one)
		if err != nil {
			return nil, err
		}

		if err := walker.Process(ctx, root, ""); err != nil {
			return nil, err
		}
	}

	return found, nil
}
