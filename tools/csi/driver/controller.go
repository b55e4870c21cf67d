package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	topologyKey  = "topology.bed.node-agent.test/node"
	leastBytes   = 8 << 20 // of an ext4 with a journal
	leastXFS     = 320 << 20
	defaultBytes = 64 << 20
	sharedKey    = "shared" // parameter of storage classes whose volumes every node reaches
)

func (d *driver) ControllerGetCapabilities(
	context.Context, *csi.ControllerGetCapabilitiesRequest,
) (*csi.ControllerGetCapabilitiesResponse, error) {
	out := &csi.ControllerGetCapabilitiesResponse{}
	for _, kind := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		rpc := &csi.ControllerServiceCapability_RPC{Type: kind}
		out.Capabilities = append(out.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: rpc},
		})
	}
	return out, nil
}

func (d *driver) CreateVolume(ctx context.Context, in *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	release, err := d.locks.take(in.Name)
	if err != nil {
		return nil, err
	}
	defer release()
	wanted, err := d.wanted(ctx, in)
	if err != nil {
		return nil, err
	}
	found, err := d.store.findVolume(in.Name)
	if err != nil {
		return nil, err
	}
	if found != nil {
		if found.Bytes < in.GetCapacityRange().GetRequiredBytes() || found.Block != wanted.Block {
			return nil, status.Errorf(codes.AlreadyExists, "volume %s exists with another size or mode", in.Name)
		}
		return d.created(found, in), nil
	}
	if err := d.faults.wait(ctx, "provision", wanted.About, wanted.About.Created); err != nil {
		return nil, err
	}
	fill, err := d.source(wanted, in.VolumeContentSource)
	if err != nil {
		return nil, err
	}
	if err := d.store.create(*wanted, fill); err != nil {
		return nil, err
	}
	return d.created(wanted, in), nil
}

// wanted is the volume that a request asks for.
func (d *driver) wanted(ctx context.Context, in *csi.CreateVolumeRequest) (*volume, error) {
	v := &volume{ID: in.Name, Bytes: in.GetCapacityRange().GetRequiredBytes(), FSType: "ext4"}
	for _, capability := range in.VolumeCapabilities {
		v.Block = v.Block || capability.GetBlock() != nil
		if fsType := capability.GetMount().GetFsType(); fsType != "" {
			v.FSType = fsType
		}
	}
	if v.Block {
		v.FSType = ""
	} else if v.FSType != "ext4" && v.FSType != "xfs" {
		return nil, status.Errorf(codes.InvalidArgument, "file system %q is not supported", v.FSType)
	}
	if v.Bytes == 0 {
		v.Bytes = defaultBytes
	}
	least := map[string]int64{"ext4": leastBytes, "xfs": leastXFS}[v.FSType]
	v.Bytes = max(v.Bytes, least)
	if limit := in.GetCapacityRange().GetLimitBytes(); limit > 0 && v.Bytes > limit {
		return nil, status.Errorf(codes.OutOfRange, "%d bytes are the least, more than the limit %d", v.Bytes, limit)
	}
	if in.Parameters[sharedKey] != "true" {
		v.Node = nearest(in.AccessibilityRequirements)
	}
	about := subject{
		Namespace: in.Parameters["csi.storage.k8s.io/pvc/namespace"], Name: in.Parameters["csi.storage.k8s.io/pvc/name"],
	}
	v.About = d.faults.describe(ctx, about)
	return v, nil
}

// nearest is the first node by name of those that a volume may be on: for a claim with a selected node, that one.
func nearest(in *csi.TopologyRequirement) string {
	var nodes []string
	for _, topology := range in.GetRequisite() {
		nodes = append(nodes, topology.Segments[topologyKey])
	}
	if len(nodes) == 0 {
		return ""
	}
	return slices.Min(nodes)
}

// source returns what fills the image of a volume, nil for an empty one, and gives the volume its file system.
func (d *driver) source(v *volume, source *csi.VolumeContentSource) (func(image string) error, error) {
	if source == nil {
		return nil, nil
	}
	if id := source.GetVolume().GetVolumeId(); id != "" {
		origin, err := d.existing(id)
		if err != nil {
			return nil, err
		}
		v.Source, v.FSType = id, origin.FSType
		fill := func(image string) error { return d.store.copy(*origin, image) }
		return fill, fits(v, origin.Bytes, origin.Block, "volume "+id)
	}
	id := source.GetSnapshot().GetSnapshotId()
	shot, err := d.taken(id)
	if err != nil {
		return nil, err
	}
	v.Source, v.FSType = id, shot.FSType
	fill := func(image string) error { return copyFile(d.store.snapshot(id), image) }
	return fill, fits(v, shot.Bytes, shot.Block, "snapshot "+id)
}

// fits returns why a volume cannot have the content of its source. A device can have the content of a file system.
func fits(v *volume, bytes int64, block bool, source string) error {
	if block && !v.Block {
		return status.Errorf(codes.InvalidArgument, "%s has no file system", source)
	}
	if v.Block {
		v.FSType = ""
	}
	if v.Bytes < bytes {
		return status.Errorf(codes.OutOfRange, "%d bytes are less than the %d of %s", v.Bytes, bytes, source)
	}
	return nil
}

func (d *driver) created(v *volume, in *csi.CreateVolumeRequest) *csi.CreateVolumeResponse {
	out := &csi.Volume{VolumeId: v.ID, CapacityBytes: v.Bytes, ContentSource: in.VolumeContentSource}
	if v.Node != "" {
		out.AccessibleTopology = []*csi.Topology{{Segments: map[string]string{topologyKey: v.Node}}}
	}
	return &csi.CreateVolumeResponse{Volume: out}
}

func (d *driver) DeleteVolume(ctx context.Context, in *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	release, err := d.locks.take(in.VolumeId)
	if err != nil {
		return nil, err
	}
	defer release()
	if v, err := d.store.findVolume(in.VolumeId); err != nil {
		return nil, err
	} else if v != nil {
		if err := d.faults.wait(ctx, "delete", v.About, time.Now()); err != nil {
			return nil, err
		}
	}
	if nodes := d.nodesOf(in.VolumeId); len(nodes) > 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is attached to %s", in.VolumeId, nodes[0])
	}
	return &csi.DeleteVolumeResponse{}, d.store.delete(in.VolumeId)
}

func (d *driver) ControllerPublishVolume(
	ctx context.Context, in *csi.ControllerPublishVolumeRequest,
) (*csi.ControllerPublishVolumeResponse, error) {
	v, err := d.existing(in.VolumeId)
	if err != nil {
		return nil, err
	}
	if err := d.faults.wait(ctx, "attach", v.About, time.Now()); err != nil {
		return nil, err
	}
	if v.Node != "" && v.Node != in.NodeId {
		return nil, status.Errorf(codes.InvalidArgument, "volume %s is on %s only", v.ID, v.Node)
	}
	if _, err := os.Stat(d.store.node(in.NodeId)); err != nil {
		return nil, status.Errorf(codes.NotFound, "there is no node %s", in.NodeId)
	}
	for _, node := range d.nodesOf(v.ID) {
		if node != in.NodeId && !manyNodes(in.VolumeCapability.GetAccessMode().GetMode()) {
			return nil, status.Errorf(codes.FailedPrecondition, "volume %s is attached to %s", v.ID, node)
		}
	}
	return &csi.ControllerPublishVolumeResponse{}, write(d.store.attached(v.ID, in.NodeId), map[string]bool{"attached": true})
}

func manyNodes(mode csi.VolumeCapability_AccessMode_Mode) bool {
	return mode == csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER ||
		mode == csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY ||
		mode == csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER
}

func (d *driver) nodesOf(id string) []string {
	entries, _ := os.ReadDir(filepath.Dir(d.store.attached(id, "x")))
	var nodes []string
	for _, entry := range entries {
		nodes = append(nodes, entry.Name())
	}
	return nodes
}

func (d *driver) ControllerUnpublishVolume(
	_ context.Context, in *csi.ControllerUnpublishVolumeRequest,
) (*csi.ControllerUnpublishVolumeResponse, error) {
	nodes := []string{in.NodeId}
	if in.NodeId == "" {
		nodes = d.nodesOf(in.VolumeId)
	}
	for _, node := range nodes {
		if err := remove(d.store.attached(in.VolumeId, node)); err != nil {
			return nil, err
		}
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

func (d *driver) existing(id string) (*volume, error) {
	v, err := d.store.findVolume(id)
	if err == nil && v == nil {
		err = status.Errorf(codes.NotFound, "volume %s does not exist", id)
	}
	return v, err
}

func (d *driver) taken(id string) (*snapshot, error) {
	if id == "" {
		return nil, status.Error(codes.InvalidArgument, "a snapshot has no ID")
	}
	shot, err := d.store.findSnapshot(id)
	if err == nil && shot == nil {
		err = status.Errorf(codes.NotFound, "snapshot %s does not exist", id)
	}
	return shot, err
}

func (d *driver) ValidateVolumeCapabilities(
	_ context.Context, in *csi.ValidateVolumeCapabilitiesRequest,
) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if _, err := d.existing(in.VolumeId); err != nil {
		return nil, err
	}
	confirmed := &csi.ValidateVolumeCapabilitiesResponse_Confirmed{VolumeCapabilities: in.VolumeCapabilities}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: confirmed}, nil
}

func (d *driver) ControllerExpandVolume(
	ctx context.Context, in *csi.ControllerExpandVolumeRequest,
) (*csi.ControllerExpandVolumeResponse, error) {
	release, err := d.locks.take(in.VolumeId)
	if err != nil {
		return nil, err
	}
	defer release()
	v, err := d.existing(in.VolumeId)
	if err != nil {
		return nil, err
	}
	if err := d.faults.wait(ctx, "expand", v.About, time.Now()); err != nil {
		return nil, err
	}
	if nodes := d.nodesOf(v.ID); len(nodes) > 0 && v.FSType == "ext4" {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is attached to %s", v.ID, nodes[0])
	}
	v.Bytes = max(v.Bytes, in.GetCapacityRange().GetRequiredBytes())
	if err := d.store.grow(*v); err != nil {
		return nil, err
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: v.Bytes}, write(d.store.image(v.ID)+".json", v)
}

// CreateSnapshot copies the volume at once. A slow storage reports it as not yet ready, like one that uploads it.
func (d *driver) CreateSnapshot(ctx context.Context, in *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	release, err := d.locks.take(in.Name)
	if err != nil {
		return nil, err
	}
	defer release()
	shot, err := d.store.findSnapshot(in.Name)
	if err != nil {
		return nil, err
	}
	if shot != nil && shot.Volume != in.SourceVolumeId {
		return nil, status.Errorf(codes.AlreadyExists, "snapshot %s is of volume %s", in.Name, shot.Volume)
	}
	about := subject{
		Snapshot:  true,
		Namespace: in.Parameters["csi.storage.k8s.io/volumesnapshot/namespace"],
		Name:      in.Parameters["csi.storage.k8s.io/volumesnapshot/name"],
	}
	about = d.faults.describe(ctx, about)
	holds, err := d.faults.holds(ctx, "snapshot", about, about.Created)
	if err != nil {
		return nil, err
	}
	if shot == nil {
		if shot, err = d.take(in.Name, in.SourceVolumeId, "", about); err != nil {
			return nil, err
		}
	}
	return &csi.CreateSnapshotResponse{Snapshot: shot.answer(!holds)}, nil
}

// take makes a snapshot; group is the one without which it cannot be deleted.
func (d *driver) take(id, volumeID, group string, about subject) (*snapshot, error) {
	v, err := d.existing(volumeID)
	if err != nil {
		return nil, err
	}
	shot := &snapshot{
		ID: id, Volume: v.ID, Bytes: v.Bytes, Block: v.Block, FSType: v.FSType, Taken: time.Now(), Group: group, About: about,
	}
	return shot, d.store.take(*v, *shot)
}

func (s *snapshot) answer(ready bool) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId: s.ID, SourceVolumeId: s.Volume, SizeBytes: s.Bytes, ReadyToUse: ready,
		CreationTime: timestamppb.New(s.Taken), GroupSnapshotId: s.Group,
	}
}

func (d *driver) DeleteSnapshot(ctx context.Context, in *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	release, err := d.locks.take(in.SnapshotId)
	if err != nil {
		return nil, err
	}
	defer release()
	if shot, err := d.store.findSnapshot(in.SnapshotId); err != nil {
		return nil, err
	} else if shot != nil {
		if err := d.faults.wait(ctx, "delete", shot.About, time.Now()); err != nil {
			return nil, err
		}
		if shot.Group != "" {
			return nil, status.Errorf(codes.FailedPrecondition, "snapshot %s is deleted only with group %s", shot.ID, shot.Group)
		}
	}
	return &csi.DeleteSnapshotResponse{}, d.store.deleteSnapshot(in.SnapshotId)
}

// ListSnapshots lists in the order of the IDs; a token is the ID with which the next answer begins.
func (d *driver) ListSnapshots(ctx context.Context, in *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	ids := []string{in.SnapshotId}
	if in.SnapshotId == "" {
		ids = d.store.snapshots()
	}
	out := &csi.ListSnapshotsResponse{}
	for _, id := range ids {
		shot, err := d.store.findSnapshot(id)
		if err != nil {
			return nil, err
		}
		if shot == nil || id < in.StartingToken || in.SourceVolumeId != "" && in.SourceVolumeId != shot.Volume {
			continue
		}
		if in.MaxEntries > 0 && len(out.Entries) == int(in.MaxEntries) {
			out.NextToken = id
			break
		}
		holds, err := d.faults.holds(ctx, "snapshot", shot.About, shot.About.Created)
		if err != nil {
			return nil, err
		}
		out.Entries = append(out.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: shot.answer(!holds)})
	}
	return out, nil
}
