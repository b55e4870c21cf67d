package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// withVolumes is a driver with two volumes, whose files need no loop devices.
func withVolumes(t *testing.T) *driver {
	d := &driver{store: &store{t.TempDir()}, faults: &faults{}, locks: newLocks()}
	for _, id := range []string{"a", "b"} {
		for _, folder := range []string{d.store.mounted(id), filepath.Dir(d.store.image(id))} {
			if err := os.MkdirAll(folder, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(d.store.image(id), []byte("of "+id), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := write(d.store.image(id)+".json", volume{ID: id, Bytes: 4, FSType: "ext4"}); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func TestMembersAreDeletedAloneUnlessTheClassSaysTogether(t *testing.T) {
	for _, together := range []string{"", "true"} {
		d, ctx := withVolumes(t), context.Background()
		in := &csi.CreateVolumeGroupSnapshotRequest{
			Name: "g", SourceVolumeIds: []string{"b", "a"}, Parameters: map[string]string{togetherKey: together},
		}
		for range 2 { // the second call finds the group
			out, err := d.CreateVolumeGroupSnapshot(ctx, in)
			if err != nil || len(out.GroupSnapshot.Snapshots) != 2 {
				t.Fatal(out, err)
			}
			for _, shot := range out.GroupSnapshot.Snapshots {
				raw, err := os.ReadFile(d.store.snapshot(shot.SnapshotId))
				if string(raw) != "of "+shot.SourceVolumeId || shot.GroupSnapshotId != "g" {
					t.Error(shot, string(raw), err)
				}
			}
		}
		_, err := d.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: []string{"a"}})
		if status.Code(err) != codes.AlreadyExists {
			t.Error(err)
		}
		listed, err := d.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SnapshotId: "g-0"})
		if err != nil || (listed.Entries[0].Snapshot.GroupSnapshotId != "") != (together != "") {
			t.Error(listed, err)
		}
		refused := codes.OK
		if together != "" {
			refused = codes.FailedPrecondition
		}
		if _, err := d.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: "g-0"}); status.Code(err) != refused {
			t.Error(err)
		}
		left, err := d.GetVolumeGroupSnapshot(ctx, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: "g"})
		if err != nil || len(left.GroupSnapshot.Snapshots) != 1+len(together)/4 {
			t.Error(left, err)
		}
		for range 2 { // the second call finds nothing
			if _, err := d.DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: "g"}); err != nil {
				t.Error(err)
			}
		}
		if ids := d.store.snapshots(); len(ids) > 0 {
			t.Error(ids)
		}
		_, err = d.GetVolumeGroupSnapshot(ctx, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: "g"})
		if status.Code(err) != codes.NotFound {
			t.Error(err)
		}
	}
}
