// Command index-blobs adds index blobs to a kopia repository, as many small backups do between two maintenances.
//
//	KOPIA_PASSWORD=… index-blobs CONFIG COUNT
//
// CONFIG is the configuration file of a connection to the repository. Each blob has one entry of its own, for a
// content that does not exist: nothing refers to it.
package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/blob"
	_ "github.com/kopia/kopia/repo/blob/filesystem"
	"github.com/kopia/kopia/repo/content/index"
	"github.com/kopia/kopia/repo/content/indexblob"
)

// Prefix of a blob that no epoch has compacted; a repository begins with epoch 0.
const prefix = "xn0_"

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	if len(os.Args) != 3 {
		return errors.New("usage: index-blobs CONFIG COUNT")
	}

	count, err := strconv.Atoi(os.Args[2])
	if err != nil {
		return err
	}

	opened, err := repo.Open(ctx, os.Args[1], os.Getenv("KOPIA_PASSWORD"), nil)
	if err != nil {
		return err
	}
	defer opened.Close(ctx)

	ctx, rep, err := opened.(repo.DirectRepository).NewDirectWriter(ctx, repo.WriteSessionOptions{})
	if err != nil {
		return err
	}
	defer rep.Close(ctx)

	parameters, err := rep.FormatManager().GetMutableParameters(ctx)
	if err != nil {
		return err
	}

	enc := indexblob.NewEncryptionManager(rep.BlobStorage(), rep.FormatManager(), nil, nil)
	for i := range count {
		if err := write(ctx, enc, i, parameters.IndexVersion); err != nil {
			return err
		}
	}

	return nil
}

// write writes index blob i as the only one of its session.
func write(ctx context.Context, enc *indexblob.EncryptionManager, i, version int) error {
	hash := sha256.Sum256([]byte(strconv.Itoa(i)))

	id, err := index.IDFromHash("", hash[:16])
	if err != nil {
		return err
	}

	builder := index.Builder{}
	builder.Add(index.Info{
		ContentID:        id,
		PackBlobID:       blob.ID(fmt.Sprintf("p%x", hash[:16])),
		PackedLength:     1,
		OriginalLength:   1,
		TimestampSeconds: time.Now().Unix(),
		FormatVersion:    byte(version),
	})

	shards, done, err := builder.BuildShards(version, true, indexblob.DefaultIndexShardSize)
	if err != nil {
		return err
	}
	defer done()

	_, err = enc.EncryptAndWriteBlob(ctx, shards[0], prefix, blob.ID(fmt.Sprintf("s%016x-c1", i)))

	return err
}
