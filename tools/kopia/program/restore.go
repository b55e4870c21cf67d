package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"time"

	"github.com/alecthomas/kingpin/v2"
	"github.com/pkg/errors"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/fs/localfs"
	"github.com/kopia/kopia/internal/timetrack"
	"github.com/kopia/kopia/internal/units"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/snapshot/restore"
	"github.com/kopia/kopia/snapshot/snapshotfs"
)

// allLevels is kopia's default for --shallow, which is 0 with placeholders.
const allLevels = 1<<31 - 1

// restorer is kopia's command restore, with the flags of the data mover, and the defaults of the others. `--packs` is
// ours: how many packs are fetched as a whole at a time. `--more-memory-mib` is what is added to Go's soft limit.
// Source: kopia 0.23.1, cli/command_restore.go.
type restorer struct {
	sources      []string
	mode         string
	parallel     int
	packs        int
	moreMemory   int64
	shallow      int32
	sparse       bool
	skipExisting bool
	ignoreErrors bool

	output   *os.File
	progress *restoreProgress
}

func (r *restorer) attach(parser *kingpin.Application) *kingpin.CmdClause {
	command := parser.Command("restore", "")
	command.Arg("sources", "").Required().StringsVar(&r.sources)
	command.Flag("mode", "").Required().EnumVar(&r.mode, "local", "tar")
	command.Flag("parallel", "").Default("8").IntVar(&r.parallel)
	command.Flag("packs", "").IntVar(&r.packs)
	command.Flag("more-memory-mib", "").Int64Var(&r.moreMemory)
	command.Flag("shallow", "").Default(fmt.Sprint(allLevels)).Int32Var(&r.shallow)
	command.Flag("write-sparse-files", "").BoolVar(&r.sparse)
	command.Flag("skip-existing", "").BoolVar(&r.skipExisting)
	command.Flag("ignore-errors", "").BoolVar(&r.ignoreErrors)

	return command
}

// restorePair is what is restored to where: an entry of a snapshot, or the one of a placeholder.
type restorePair struct {
	source, target string
	placeholder    bool
}

func (r *restorer) restore(ctx context.Context, rep repo.Repository) error {
	pairs, err := r.pairs()
	if err != nil {
		return err
	}

	output, err := r.open(ctx, pairs[0].target)
	if err != nil {
		return errors.Wrap(err, "unable to initialize output")
	}

	if r.moreMemory > 0 {
		defer debug.SetMemoryLimit(debug.SetMemoryLimit(debug.SetMemoryLimit(-1) + r.moreMemory<<20))
	}

	plan, end := r.plan(ctx, rep, output)
	defer end()

	for _, one := range pairs {
		entry, err := r.find(ctx, rep, one, output)
		if err != nil {
			return err
		}

		if plan != nil && !one.placeholder {
			entry = plan.wrap(entry, "")
		}

		done, err := restore.Entry(ctx, rep, output, entry, restore.Options{
			Parallel:               r.parallel,
			Incremental:            r.skipExisting,
			IgnoreErrors:           r.ignoreErrors,
			RestoreDirEntryAtDepth: r.shallow,
			ProgressCallback:       func(_ context.Context, stats restore.Stats) { r.progress.report(&stats, false) },
		})
		if err != nil {
			return errors.Wrap(err, "error restoring")
		}

		r.progress.report(&done, true)
	}

	return nil
}

// plan returns the plan of packs, if there is one, and what ends it.
func (r *restorer) plan(ctx context.Context, rep repo.Repository, output restore.Output) (*packPlan, func()) {
	direct, ok := rep.(repo.DirectRepository)
	if !ok || r.packs < 1 || r.shallow != allLevels {
		return nil, func() {}
	}

	parallel := r.parallel
	if !output.Parallelizable() {
		// The data mover has memory for two readers for each pack.
		parallel = 2 * r.packs
	}

	ctx, cancel := context.WithCancel(ctx)
	plan := newPackPlan(ctx, direct, r.packs, parallel, func(path string, file fs.File) bool {
		return r.skipExisting && output.FileExists(ctx, path, file)
	})

	return plan, func() {
		cancel()
		plan.tasks.Wait()
	}
}

// pairs returns what is restored: placeholders, or one entry of a snapshot.
func (r *restorer) pairs() ([]restorePair, error) {
	var found []restorePair

	for _, one := range r.sources {
		path, err := filepath.Abs(one)
		if err != nil {
			return nil, errors.Wrapf(err, "restore can't resolve path for %q", one)
		}

		if restore.PathIfPlaceholder(one) != "" {
			found = append(found, restorePair{path, restore.PathIfPlaceholder(path), true})
		}
	}

	if len(found) == len(r.sources) {
		return found, nil
	}

	if len(found) > 0 || len(r.sources) != 2 { //nolint:mnd // a source and a target
		return nil, errors.New("restore requires a source and targetpath or placeholders")
	}

	target, err := filepath.Abs(r.sources[1])

	return []restorePair{{r.sources[0], target, false}}, errors.Wrapf(err, "restore can't resolve path for %q", r.sources[1])
}

// open returns where to write: a file system, or a tar archive to the output of the call.
func (r *restorer) open(ctx context.Context, target string) (restore.Output, error) {
	if r.mode == "tar" {
		return restore.NewTarOutput(r.output), nil
	}

	output := &restore.FilesystemOutput{
		TargetPath:             target,
		OverwriteDirectories:   true,
		OverwriteFiles:         true,
		OverwriteSymlinks:      true,
		IgnorePermissionErrors: true,
		WriteSparseFiles:       r.sparse,
	}

	return output, errors.Wrap(output.Init(ctx), "unable to create output file")
}

// find returns the entry to restore; of a placeholder, the output is where it is.
func (r *restorer) find(ctx context.Context, rep repo.Repository, one restorePair, output restore.Output) (fs.Entry, error) {
	if !one.placeholder {
		entry, err := snapshotfs.FilesystemEntryFromIDWithPath(ctx, rep, one.source, false)

		return entry, errors.Wrap(err, "unable to get filesystem entry")
	}

	entry, err := snapshotfs.GetEntryFromPlaceholder(ctx, rep, localfs.PlaceholderFilePath(one.source))
	if err != nil {
		return nil, errors.Wrapf(err, "placeholder can't be reified: unable to get filesystem entry for placeholder %q", one.source)
	}

	files, ok := output.(*restore.FilesystemOutput)
	if !ok {
		return nil, errors.New("placeholder can't be reified: placeholder expansion is only relevant to filesystem output")
	}

	files.TargetPath = one.target

	if r.shallow == allLevels {
		r.shallow = 0
	}

	return entry, nil
}

// restoreProgress writes kopia's progress lines.
type restoreProgress struct {
	enabled  bool
	interval time.Duration
	out      io.Writer

	throttle timetrack.Throttle
	mu       sync.Mutex
}

// report writes a line, not too often unless it is the last one. Source: kopia 0.23.1, cli/restore_progress.go.
func (p *restoreProgress) report(stats *restore.Stats, last bool) {
	if !p.enabled || stats.RestoredTotalFileSize == 0 || (!last && !p.throttle.ShouldOutput(p.interval)) {
		return
	}

	p.mu.Lock()
	defer p.mu.Unlock()

	skipped := ""
	if stats.SkippedCount > 0 {
		skipped = fmt.Sprintf(", skipped %v (%v)", stats.SkippedCount, units.BytesString(stats.SkippedTotalFileSize))
	}

	fmt.Fprintf(p.out, "Processed %v (%v) of %v (%v)%v.\n", //nolint:errcheck // the mover may be gone
		stats.RestoredFileCount+stats.RestoredDirCount+stats.RestoredSymlinkCount+stats.SkippedCount,
		units.BytesString(stats.RestoredTotalFileSize),
		stats.EnqueuedFileCount+stats.EnqueuedDirCount+stats.EnqueuedSymlinkCount,
		units.BytesString(stats.EnqueuedTotalFileSize), skipped)
}
