package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pkg/errors"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/repo/logging"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/policy"
	"github.com/kopia/kopia/snapshot/upload"
)

const (
	progressInterval = 200 * time.Millisecond

	// The size is estimated by a walk through the volume, which costs as much as the backup of an unchanged one: it begins
	// with the first file that is read, or so late.
	estimateAfter = 2 * time.Second
)

// progress is a reading of what is done; the estimate of the size is 0 until it is known.
type progress struct {
	HashedFiles    int64    `json:"hashed_files"`
	HashedBytes    int64    `json:"hashed_bytes"`
	CachedFiles    int64    `json:"cached_files"`
	CachedBytes    int64    `json:"cached_bytes"`
	EstimatedBytes int64    `json:"estimated_bytes"`
	Counters       counters `json:"counters"`
}

// report writes what happens as JSON lines, and errors of single files as kopia's command line does.
type report struct {
	upload.Progress

	mu       sync.Mutex
	out      *json.Encoder
	messages io.Writer

	hashedFiles, hashedBytes, cachedFiles, cachedBytes, estimatedBytes atomic.Int64

	estimateAfter time.Duration
	begin         sync.Once
	begun         chan struct{}

	// cancel ends the upload at the first error; failed is how many there were. Entries that are gone are none.
	cancel          func()
	failed          int32
	gone            map[string]bool
	goneDirectories map[string]bool

	once  sync.Once
	ended chan struct{}
	done  chan struct{}
}

// newReport reports progress from now on, until it is stopped: also while the repository is opened.
func newReport(out, messages io.Writer) *report {
	r := &report{
		Progress: &upload.NullUploadProgress{}, out: json.NewEncoder(out), messages: messages,
		cancel: func() {}, gone: map[string]bool{}, goneDirectories: map[string]bool{},
		estimateAfter: estimateAfter, begun: make(chan struct{}), ended: make(chan struct{}), done: make(chan struct{}),
	}
	go r.repeat()

	return r
}

func (r *report) repeat() {
	defer close(r.done)

	ticker := time.NewTicker(progressInterval)
	defer ticker.Stop()

	for {
		select {
		case <-r.ended:
			return
		case <-ticker.C:
			_ = r.write("progress", r.read())
		}
	}
}

// stop reports the last progress.
func (r *report) stop() {
	r.once.Do(func() {
		close(r.ended)
		<-r.done

		_ = r.write("progress", r.read())
	})
}

// write writes a line with one key.
func (r *report) write(key string, value any) error {
	r.mu.Lock()
	defer r.mu.Unlock()

	return r.out.Encode(map[string]any{key: value})
}

func (r *report) read() *progress {
	return &progress{
		HashedFiles:    r.hashedFiles.Load(),
		HashedBytes:    r.hashedBytes.Load(),
		CachedFiles:    r.cachedFiles.Load(),
		CachedBytes:    r.cachedBytes.Load(),
		EstimatedBytes: r.estimatedBytes.Load(),
		Counters:       readCounters(),
	}
}

// estimateLater estimates the size of a volume unless its backup ends before: roughly, without a walk through it, or as kopia's
// command line does. It returns what ends it.
func (r *report) estimateLater(ctx context.Context, volume fs.Directory, tree *policy.Tree, roughly bool) (end func()) {
	parameters := upload.EstimationParameters{Type: upload.EstimationTypeClassic}
	if roughly {
		parameters.Type = upload.EstimationTypeRough
	}

	estimator := upload.NewEstimator(volume, tree, parameters, logging.Module("mover-backup")(ctx))
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})

	go func() {
		defer close(ended)

		select {
		case <-ctx.Done():
			return
		case <-r.begun:
		case <-time.After(r.estimateAfter):
		}

		estimator.StartEstimation(ctx, r.EstimatedDataSize)
		estimator.Wait()
	}()

	return func() {
		cancel()
		<-ended
	}
}

// HashingFile implements upload.Progress.
func (r *report) HashingFile(path string) {
	r.begin.Do(func() { close(r.begun) })
	r.Progress.HashingFile(path)
}

// HashedBytes implements upload.Progress.
func (r *report) HashedBytes(count int64) { r.hashedBytes.Add(count) }

// FinishedHashingFile implements upload.Progress.
func (r *report) FinishedHashingFile(string, int64) { r.hashedFiles.Add(1) }

// CachedFile implements upload.Progress.
func (r *report) CachedFile(_ string, size int64) {
	r.cachedFiles.Add(1)
	r.cachedBytes.Add(size)
}

// EstimatedDataSize implements upload.Progress.
func (r *report) EstimatedDataSize(_, bytes int64) { r.estimatedBytes.Store(bytes) }

// Error implements upload.Progress.
func (r *report) Error(path string, err error, ignored bool) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if found := (goneError{}); errors.As(err, &found) {
		r.gone[path] = true

		if found.directory != "" {
			r.goneDirectories[found.directory] = true
		}

		return
	}

	kind := "Error"
	if ignored {
		kind = "Ignored error"
	} else {
		r.failed++
		r.cancel()
	}

	fmt.Fprintf(r.messages, "%s when processing \"%v\": %v\n", kind, path, err) //nolint:errcheck
}

// leaveOut takes entries that were deleted meanwhile out of the errors of a snapshot.
func (r *report) leaveOut(made *snapshot.Manifest) {
	r.mu.Lock()
	defer r.mu.Unlock()

	summary := made.RootEntry.DirSummary
	if summary == nil || len(r.gone) == 0 {
		return
	}

	summary.FatalErrorCount, made.Stats.ErrorCount = int(r.failed), r.failed
	summary.FailedEntries = slices.DeleteFunc(summary.FailedEntries, func(one *fs.EntryWithError) bool {
		return r.gone[one.EntryPath]
	})
}
