package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/alecthomas/kingpin/v2"
	"github.com/pkg/errors"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/fs/virtualfs"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/logging"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/policy"
	"github.com/kopia/kopia/snapshot/upload"
)

// A user's tag has this prefix in a manifest. Source: kopia 0.23.1, cli/command_snapshot_create.go (getTags).
const tagPrefix = "tag:"

// offer is what the repository has of a source: all that its decision depends on.
type offer struct {
	UniqueID  string               `json:"unique_id"`
	Snapshots []*snapshot.Manifest `json:"snapshots,omitempty"`
	// Policy is the effective one, Defined the source's own, or nil.
	Policy  *policy.Policy `json:"policy"`
	Defined *policy.Policy `json:"defined"`
}

// decision says how the source is backed up.
type decision struct {
	Path string `json:"path"`
	// File is the name that a device gets, which is stored as one file.
	File    string   `json:"file"`
	Parents []parent `json:"parents"`
	// Delete has incomplete snapshots that go before the backup.
	Delete []manifest.ID `json:"delete"`
	// Policy is the source's own from now on; nil: it stays as it is.
	Policy *policy.Policy `json:"policy"`
	// Exclude is left out of this backup besides what the policy leaves out.
	Exclude           exclusions        `json:"exclude"`
	RoughEstimate     bool              `json:"rough_estimate"`
	Tags              map[string]string `json:"tags"`
	Pins              []string          `json:"pins"`
	Parallel          int               `json:"parallel"`
	CheckpointSeconds float64           `json:"checkpoint_seconds"`
	// ChangesTag is the tag of a snapshot, complete or not, for the time up to which it has all changes.
	ChangesTag string `json:"changes_tag"`
	// MayBeCopy: the volume is no live one, so a driver may have copied it.
	MayBeCopy bool `json:"may_be_copy"`
	// RequestedAt is a time after the state that such a volume has, and before its mount, if that is known.
	RequestedAt time.Time `json:"requested_at"`
}

// exclusions are rules for one backup; without a limit of the size MaxBytes is 0.
type exclusions struct {
	Patterns      []string `json:"patterns"`
	MaxBytes      int64    `json:"max_bytes"`
	OneFileSystem bool     `json:"one_file_system"`
}

// parent is a snapshot that unchanged files are taken from: those that were not changed after Until.
type parent struct {
	ID    manifest.ID `json:"id"`
	Until time.Time   `json:"until"`
}

// result is the snapshot, complete or not. Copied: its volume is a copy of the parent's, see changes.go. GoneDirectories were
// listed, and were not found, or had moved, before all in them was read. DeleteFault is why incomplete snapshots were not
// deleted.
type result struct {
	Snapshot        *snapshot.Manifest `json:"snapshot"`
	Copied          bool               `json:"copied"`
	GoneDirectories int                `json:"gone_directories"`
	DeleteFault     string             `json:"delete_fault"`
}

// backup offers what the repository has of a source, and backs it up as is decided. From is nil if that is a directory.
type backup func(
	ctx context.Context, rep repo.Repository, source snapshot.SourceInfo, from *device, decisions io.Reader, report *report,
) error

// attachBackup adds a subcommand for a backup, which opens the repository once.
//
// Standard output has JSON lines: {"offer": …} once it is open, {"progress": …}, and {"result": …}. The decision is read
// from standard input in between. SIGTERM ends the backup with an incomplete snapshot, or a checkpoint if some are saved.
func attachBackup(parser *kingpin.Application, name, help string, isDevice bool, do backup) {
	command := parser.Command(name, help+" as standard input decides (for the data mover)").Hidden()
	text := command.Flag("source", "Source, as user@host:path").Required().String()
	fd, size := deviceFlags(command)
	command.Action(opener{parser}.action(func(ctx context.Context, rep repo.Repository, report *report) error {
		source, err := parseSource(rep, *text)
		if err != nil {
			return err
		}

		var from *device

		if isDevice || *fd != 0 {
			if from, err = openDevice(*fd, *size, false); err != nil {
				return err
			}
		}

		return do(ctx, rep, source, from, os.Stdin, report)
	}))
}

// backUp is the backup of a directory, or of a device as one file.
func backUp(
	ctx context.Context, rep repo.Repository, source snapshot.SourceInfo, from *device, decisions io.Reader, report *report,
) error {
	found, err := readOffer(ctx, rep, source)
	if err != nil {
		return err
	}

	decided := &decision{}
	if err := decide(found, decisions, report, decided); err != nil {
		return err
	}

	made := &result{}
	session := repo.WriteSessionOptions{Purpose: "mover-backup", OnUpload: report.UploadedBytes}

	if len(decided.Delete) > 0 {
		// In a session of its own: if it fails, the backup does not.
		if err := repo.WriteSession(ctx, rep, session, func(ctx context.Context, w repo.RepositoryWriter) error {
			return deleteIncomplete(ctx, w, decided.Delete)
		}); err != nil {
			made.DeleteFault = err.Error()
		}
	}

	return repo.WriteSession(ctx, rep, session, func(ctx context.Context, w repo.RepositoryWriter) error {
		return carryOut(ctx, w, source, from, decided, report, made)
	})
}

// decide offers what the repository has, and reads what is decided.
func decide(found any, decisions io.Reader, report *report, decided any) error {
	if err := report.write("offer", found); err != nil {
		return err
	}

	return errors.Wrap(json.NewDecoder(decisions).Decode(decided), "read the decision")
}

func readOffer(ctx context.Context, rep repo.Repository, source snapshot.SourceInfo) (*offer, error) {
	snapshots, err := snapshot.ListSnapshots(ctx, rep, source)
	if err != nil {
		return nil, errors.Wrap(err, "list snapshots")
	}

	effective, _, _, err := policy.GetEffectivePolicy(ctx, rep, source)
	if err != nil {
		return nil, errors.Wrap(err, "unable to get policy")
	}

	defined, err := policy.GetDefinedPolicy(ctx, rep, source)
	if err != nil && !errors.Is(err, policy.ErrPolicyNotFound) {
		return nil, errors.Wrap(err, "unable to get policy")
	}

	id := ""
	if direct, ok := rep.(repo.DirectRepository); ok {
		id = hex.EncodeToString(direct.UniqueID())
	}

	return &offer{id, snapshot.SortByTime(snapshots, false), effective, defined}, nil
}

// carryOut makes the snapshot, and reports it once all of it is in the repository, or may be.
func carryOut(
	ctx context.Context, w repo.RepositoryWriter, source snapshot.SourceInfo, from *device, decided *decision, report *report,
	done *result,
) error {
	if decided.Policy != nil {
		if err := policy.SetPolicy(ctx, w, source, decided.Policy); err != nil {
			return errors.Wrapf(err, "can't save policy for %v", source)
		}
	}

	tree, err := buildTree(ctx, w, source, &decided.Exclude)
	if err != nil {
		return err
	}

	made, copied, err := uploadVolume(ctx, w, source, from, decided, tree, report)
	if err != nil {
		// As kopia does: what was sent serves the next backup.
		_ = w.Flush(ctx)

		return errors.Wrap(err, "upload error")
	}

	if _, err := snapshot.SaveSnapshot(ctx, w, made); err != nil {
		return errors.Wrap(err, "cannot save manifest")
	}

	// It removes incomplete snapshots that are older than a complete one.
	if _, err := policy.ApplyRetentionPolicy(ctx, w, source, true); err != nil {
		return errors.Wrap(err, "unable to apply retention policy")
	}

	// The flush that stores the snapshot deletes them; what stays, the next backup finds.
	if abandoned, err := findAbandoned(ctx, w, w.Time()); err == nil {
		_ = deleteIncomplete(ctx, w, abandoned)
	}

	flushed := w.Flush(ctx)
	if flushed != nil && made.IncompleteReason != "" {
		return errors.Wrap(flushed, "flush error")
	}

	report.stop()

	// Of a complete one also if that fails: it may be in the repository nevertheless, so that the mover deletes it.
	done.Snapshot, done.Copied, done.GoneDirectories = made, copied, len(report.goneDirectories)
	if err := report.write("result", done); err != nil {
		return err
	}

	if flushed != nil {
		return errors.Wrap(flushed, "flush error")
	}

	if summary := made.RootEntry.DirSummary; summary != nil && summary.FatalErrorCount > 0 {
		return errors.Errorf("Found %v fatal error(s) while snapshotting %v.", summary.FatalErrorCount, source)
	}

	return nil
}

// deleteIncomplete deletes incomplete snapshots; one that is gone is no error.
func deleteIncomplete(ctx context.Context, w repo.RepositoryWriter, ids []manifest.ID) error {
	for _, id := range ids {
		if err := w.DeleteManifest(ctx, id); err != nil && !errors.Is(err, manifest.ErrNotFound) {
			return errors.Wrapf(err, "delete incomplete snapshot %v", id)
		}
	}

	return nil
}

// buildTree returns the policies of the source and of what is below it, with the exclusions in that of the source: after the
// other rules, whose exceptions do not concern them.
func buildTree(ctx context.Context, w repo.RepositoryWriter, source snapshot.SourceInfo, exclude *exclusions) (*policy.Tree, error) {
	effective, _, _, err := policy.GetEffectivePolicy(ctx, w, source)
	if err != nil {
		return nil, errors.Wrap(err, "unable to get policy")
	}

	files := &effective.FilesPolicy
	files.IgnoreRules = slices.Concat(files.IgnoreRules, exclude.Patterns)

	if most := exclude.MaxBytes; most != 0 && (files.MaxFileSize == 0 || most < files.MaxFileSize) {
		files.MaxFileSize = most
	}

	if exclude.OneFileSystem {
		files.OneFileSystem = policy.NewOptionalBool(true)
	}

	// It has all that the source inherits, if it does.
	effective.NoParent = true
	tree, err := policy.TreeForSourceWithOverride(ctx, w, source, effective)

	return tree, errors.Wrap(err, "unable to get policy tree")
}

// uploadVolume runs kopia's uploader, and returns the manifest, which is not saved yet.
// Source: kopia 0.23.1, cli/command_snapshot_create.go (setupUploader, snapshotSingleSource).
func uploadVolume(
	ctx context.Context, w repo.RepositoryWriter, source snapshot.SourceInfo, from *device, decided *decision, tree *policy.Tree,
	report *report,
) (*snapshot.Manifest, bool, error) {
	root, err := openVolume(decided, from)
	if err != nil {
		return nil, false, err
	}

	uploader := upload.NewUploader(w)
	report.cancel = uploader.Cancel
	uploader.ParallelUploads = decided.Parallel
	uploader.CheckpointInterval = time.Duration(decided.CheckpointSeconds * float64(time.Second))
	uploader.Progress = report

	cancelOnSignal(uploader.Cancel)

	parents, err := loadParents(ctx, w, decided.Parents)
	if err != nil {
		return nil, false, err
	}

	// All that a checkpoint has is read, or compared with the parents, from now on.
	began := w.Time()
	watched, copied := watchChanges(w, root, decided, parents, report)
	uploader.CheckpointLabels = map[string]string{tagPrefix + decided.ChangesTag: formatTime(began.Add(-watched.changes.tick()))}

	if watched.changes.checked {
		parents = nil
	}

	// The data mover takes this as the start of the snapshot, by which it knows checkpoints.
	logging.Module("mover-backup")(ctx).Infof("Snapshotting %v ...", source)

	endEstimate := report.estimateLater(ctx, watched, tree, decided.RoughEstimate)
	made, err := uploader.Upload(ctx, watched, tree, source, parents...)
	endEstimate()

	if err != nil {
		return nil, false, err
	}

	report.leaveOut(made)

	made.Tags = map[string]string{tagPrefix + decided.ChangesTag: formatTime(watched.changes.until(made.StartTime.ToTime()))}
	for key, value := range decided.Tags {
		made.Tags[tagPrefix+key] = value
	}

	if made.IncompleteReason == "" {
		made.UpdatePins(decided.Pins, nil)
	}

	return made, copied, nil
}

func formatTime(at time.Time) string { return at.UTC().Format(time.RFC3339Nano) }

// openVolume returns the directory at the path, which may be a link to it, or one with the device as its only file.
func openVolume(decided *decision, from *device) (fs.Directory, error) {
	if from != nil {
		file := virtualfs.StreamingFileFromReader(decided.File, io.NopCloser(newDeviceReader(from)))

		return virtualfs.NewStaticDirectory(decided.Path, []fs.Entry{file}), nil
	}

	return openDirectory(decided.Path)
}

func loadParents(ctx context.Context, rep repo.Repository, wanted []parent) ([]*snapshot.Manifest, error) {
	found := make([]*snapshot.Manifest, 0, len(wanted))

	for _, one := range wanted {
		loaded, err := snapshot.LoadSnapshot(ctx, rep, one.ID)
		if err != nil {
			return nil, errors.Wrapf(err, "parent %v", one.ID)
		}

		found = append(found, loaded)
	}

	return found, nil
}

// cancelOnSignal has the upload end with what it has read. Once all is read, a signal changes nothing: it does not end the
// process either, which writes the snapshot then.
func cancelOnSignal(cancel func()) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)

	go func() {
		<-signals
		cancel()
	}()
}
