package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// togetherKey is the parameter of VolumeGroupSnapshotClasses whose snapshots are deleted only with their group.
const togetherKey = "together"

// group is what was taken at once: its ID is that of all its snapshots, with a number.
type group struct {
	ID        string    `json:"id"`
	Volumes   []string  `json:"volumes"`
	Snapshots []string  `json:"snapshots"`
	Taken     time.Time `json:"taken"`
}

func (s *store) group(id string) string { return filepath.Join(s.base, "groups", id) + ".json" }

func (d *driver) GroupControllerGetCapabilities(
	context.Context, *csi.GroupControllerGetCapabilitiesRequest,
) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	rpc := &csi.GroupControllerServiceCapability_RPC{
		Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
	}
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{
		{Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: rpc}},
	}}, nil
}

func (d *driver) CreateVolumeGroupSnapshot(
	_ context.Context, in *csi.CreateVolumeGroupSnapshotRequest,
) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	release, err := d.locks.take(in.Name)
	if err != nil {
		return nil, err
	}
	defer release()
	found, err := read[group](d.store.group(in.Name))
	if err != nil {
		return nil, err
	}
	volumes := slices.Sorted(slices.Values(in.SourceVolumeIds))
	if found != nil && !slices.Equal(found.Volumes, volumes) {
		return nil, status.Errorf(codes.AlreadyExists, "group %s is of other volumes", in.Name)
	}
	if found == nil {
		found = &group{ID: in.Name, Volumes: volumes, Taken: time.Now()}
		together := ""
		if in.Parameters[togetherKey] == "true" {
			together = found.ID
		}
		for number, id := range volumes {
			shot, err := d.take(fmt.Sprintf("%s-%d", found.ID, number), id, together, subject{Snapshot: true})
			if err != nil {
				return nil, err
			}
			found.Snapshots = append(found.Snapshots, shot.ID)
		}
		if err := write(d.store.group(found.ID), found); err != nil {
			return nil, err
		}
	}
	answer, err := d.answerGroup(found)
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: answer}, err
}

func (d *driver) answerGroup(found *group) (*csi.VolumeGroupSnapshot, error) {
	out := &csi.VolumeGroupSnapshot{
		GroupSnapshotId: found.ID, CreationTime: timestamppb.New(found.Taken), ReadyToUse: true,
	}
	for _, id := range found.Snapshots {
		shot, err := d.store.findSnapshot(id)
		if err != nil {
			return nil, err
		}
		if shot == nil { // it was deleted alone
			continue
		}
		answer := shot.answer(true)
		answer.GroupSnapshotId = found.ID
		out.Snapshots = append(out.Snapshots, answer)
	}
	return out, nil
}

func (d *driver) GetVolumeGroupSnapshot(
	_ context.Context, in *csi.GetVolumeGroupSnapshotRequest,
) (*csi.GetVolumeGroupSnapshotResponse, error) {
	found, err := read[group](d.store.group(in.GroupSnapshotId))
	if err != nil {
		return nil, err
	}
	if found == nil {
		return nil, status.Errorf(codes.NotFound, "group %s does not exist", in.GroupSnapshotId)
	}
	answer, err := d.answerGroup(found)
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: answer}, err
}

func (d *driver) DeleteVolumeGroupSnapshot(
	_ context.Context, in *csi.DeleteVolumeGroupSnapshotRequest,
) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	release, err := d.locks.take(in.GroupSnapshotId)
	if err != nil {
		return nil, err
	}
	defer release()
	found, err := read[group](d.store.group(in.GroupSnapshotId))
	if err != nil || found == nil {
		return &csi.DeleteVolumeGroupSnapshotResponse{}, err
	}
	for _, id := range found.Snapshots {
		err = errors.Join(err, d.store.deleteSnapshot(id))
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, errors.Join(err, remove(d.store.group(found.ID)))
}
