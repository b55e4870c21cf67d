// Command backups writes and deletes snapshots of volumes that do not exist, at times that its caller names.
//
//	KOPIA_PASSWORD=… backups CONFIG
//
// CONFIG is the configuration file of a connection to the repository, with a storage of the type `directory`. Each line of standard input is a request as JSON,
// and each line of standard output its answer. Every request opens the repository anew, as a data mover does, and every
// snapshot has a session of its own.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/repo/object"
)

// request is what is done at one moment: in this order, as far as it is given.
type request struct {
	Time   time.Time     `json:"time"`
	Write  *backup       `json:"write"`
	Delete []manifest.ID `json:"delete"`
	// Track finds out what only the snapshots of Delete held, for Stored to look for later.
	Track  bool `json:"track"`
	Stored bool `json:"stored"`
}

// backup is one snapshot of each source: Rounds times Files new files of Bytes random bytes, with an index blob after
// each round and one for directories and manifest, and BaseFiles files that later snapshots of the source have, too.
type backup struct {
	Sources   []string `json:"sources"`
	Rounds    int      `json:"rounds"`
	Files     int      `json:"files"`
	Bytes     int      `json:"bytes"`
	BaseFiles int      `json:"base_files"`
}

// answer has the snapshots that were written, and bytes of contents: those that only deleted snapshots held, and those
// of them that the bucket still has.
type answer struct {
	Snapshots   []manifest.ID `json:"snapshots"`
	HeldBytes   int64         `json:"held_bytes"`
	StoredBytes int64         `json:"stored_bytes"`
}

// helper is what is known from one request to the next.
type helper struct {
	config string
	random *rand.ChaCha8
	bases  map[string]object.ID
	held   tracked
	time   time.Time
	began  time.Time
}

// now returns the time that the request names, and moves on from there.
func (h *helper) now() time.Time {
	return h.time.Add(time.Since(h.began))
}

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	if len(os.Args) != 2 {
		return errors.New("usage: backups CONFIG")
	}

	h := &helper{config: os.Args[1], random: rand.NewChaCha8([32]byte{}), bases: map[string]object.ID{}, held: tracked{}}
	registerDirectory(h.now)

	answers := json.NewEncoder(os.Stdout)

	lines := bufio.NewReader(os.Stdin)
	for requests := json.NewDecoder(lines); requests.More(); {
		var wanted request
		if err := requests.Decode(&wanted); err != nil {
			return err
		}

		done, err := h.serve(ctx, &wanted)
		if err != nil {
			return err
		}

		if err := answers.Encode(done); err != nil {
			return err
		}
	}

	return nil
}

func (h *helper) serve(ctx context.Context, wanted *request) (*answer, error) {
	h.time, h.began = wanted.Time, time.Now()

	opened, err := repo.Open(ctx, h.config, os.Getenv("KOPIA_PASSWORD"), &repo.Options{TimeNowFunc: h.now})
	if err != nil {
		return nil, err
	}
	defer opened.Close(ctx)

	rep, ok := opened.(repo.DirectRepository)
	if !ok {
		return nil, errors.New("the repository is behind a server")
	}

	done := &answer{Snapshots: []manifest.ID{}}

	if wanted.Write != nil {
		if done.Snapshots, err = h.write(ctx, rep, wanted.Write); err != nil {
			return nil, err
		}
	}

	if wanted.Track {
		if done.HeldBytes, err = h.held.add(ctx, rep, wanted.Delete); err != nil {
			return nil, err
		}
	}

	if len(wanted.Delete) > 0 {
		if err := remove(ctx, rep, wanted.Delete); err != nil {
			return nil, err
		}
	}

	if wanted.Stored {
		if done.StoredBytes, err = h.held.stored(ctx, rep); err != nil {
			return nil, err
		}
	}

	return done, nil
}
