package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func (d *driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	topology := &csi.Topology{Segments: map[string]string{topologyKey: d.node}}
	return &csi.NodeGetInfoResponse{NodeId: d.node, AccessibleTopology: topology}, nil
}

func (d *driver) NodeGetCapabilities(
	context.Context, *csi.NodeGetCapabilitiesRequest,
) (*csi.NodeGetCapabilitiesResponse, error) {
	out := &csi.NodeGetCapabilitiesResponse{}
	for _, kind := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		rpc := &csi.NodeServiceCapability_RPC{Type: kind}
		out.Capabilities = append(out.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: rpc},
		})
	}
	return out, nil
}

// NodePublishVolume mounts the volume for a pod. There is no stage before it: a kubelet does not end one while the
// file system is mounted in another place as well, as it is here in the storage's folder.
// Source: https://github.com/kubernetes/kubernetes/blob/v1.34.2/pkg/volume/util/util.go (HasMountRefs)
func (d *driver) NodePublishVolume(
	_ context.Context, in *csi.NodePublishVolumeRequest,
) (*csi.NodePublishVolumeResponse, error) {
	v, err := d.existing(in.VolumeId)
	if err != nil {
		return nil, err
	}
	// Another PersistentVolume of the same volume may have another mode.
	capability := in.GetVolumeCapability()
	if v.Block != (capability.GetBlock() != nil) {
		if err := d.store.adopt(v, capability.GetMount().GetFsType()); err != nil {
			return nil, err
		}
	}
	if !v.Block {
		return &csi.NodePublishVolumeResponse{}, bind(d.store.mounted(v.ID), in.TargetPath, in.Readonly)
	}
	device, err := d.store.device(v.ID)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(in.TargetPath), 0o750); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(in.TargetPath, os.O_CREATE, 0o660)
	if err != nil {
		return nil, err
	}
	file.Close()
	return &csi.NodePublishVolumeResponse{}, bind(device, in.TargetPath, in.Readonly)
}

func (d *driver) NodeUnpublishVolume(
	_ context.Context, in *csi.NodeUnpublishVolumeRequest,
) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := unbind(in.TargetPath); err != nil {
		return nil, err
	}
	if err := os.Remove(in.TargetPath); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// bind mounts source on target; one that an earlier call has mounted stays.
func bind(source, target string, readOnly bool) error {
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	if info.IsDir() {
		if err := os.MkdirAll(target, 0o750); err != nil {
			return err
		}
	}
	if isSame(source, target) {
		return nil
	}
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return &fs.PathError{Op: "bind", Path: target, Err: err}
	}
	if !readOnly {
		return nil
	}
	return unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
}

func isSame(one, other string) bool {
	a, err := os.Stat(one)
	if err != nil {
		return false
	}
	b, err := os.Stat(other)
	return err == nil && os.SameFile(a, b)
}

func unbind(target string) error {
	err := unix.Unmount(target, 0)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // no mount, or an earlier call has ended it
		return nil
	}
	return err
}

func (d *driver) NodeGetVolumeStats(
	_ context.Context, in *csi.NodeGetVolumeStatsRequest,
) (*csi.NodeGetVolumeStatsResponse, error) {
	v, err := d.existing(in.VolumeId)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(in.VolumePath); err != nil {
		return nil, status.Errorf(codes.NotFound, "%v", err)
	}
	bytes := &csi.VolumeUsage{Unit: csi.VolumeUsage_BYTES, Total: v.Bytes}
	if v.Block {
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{bytes}}, nil
	}
	var found unix.Statfs_t
	if err := unix.Statfs(in.VolumePath, &found); err != nil {
		return nil, err
	}
	size := int64(found.Bsize)
	bytes.Total, bytes.Available = int64(found.Blocks)*size, int64(found.Bavail)*size
	bytes.Used = bytes.Total - int64(found.Bfree)*size
	inodes := &csi.VolumeUsage{
		Unit: csi.VolumeUsage_INODES, Total: int64(found.Files), Available: int64(found.Ffree),
		Used: int64(found.Files) - int64(found.Ffree),
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{bytes, inodes}}, nil
}
