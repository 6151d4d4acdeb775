PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE decisions (number INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE events (number INTEGER PRIMARY KEY, record TEXT NOT NULL);
INSERT INTO "events" VALUES(1,'{"number":1,"time":1795564251.188485,"node_id":"","rank":-1,"step":-1,"kind":"master","text":"the master of epoch 1 listens at 127.0.0.1:39321","details":"","restart":0}');
INSERT INTO "events" VALUES(2,'{"number":2,"time":1795564251.2628272,"node_id":"node-a-70648c64","rank":-1,"step":-1,"kind":"node-joined","text":"node node-a-70648c64 (pid 26488 on node-a) has joined","details":"","restart":0}');
INSERT INTO "events" VALUES(3,'{"number":3,"time":1795564251.2852366,"node_id":"","rank":-1,"step":-1,"kind":"membership","text":"membership 1: 1 node, 2 ranks: the job starts","details":"","restart":0}');
INSERT INTO "events" VALUES(4,'{"number":4,"time":1795564250.7274835,"node_id":"node-a-70648c64","rank":-1,"step":-1,"kind":"membership","text":"membership 1: 1 node, 2 ranks: the job starts","details":"{\"plan\": 1, \"nodes\": [\"node-a-26488-e8a5\"]}","restart":0}');
INSERT INTO "events" VALUES(5,'{"number":5,"time":1795564250.7445943,"node_id":"node-a-70648c64","rank":-1,"step":-1,"kind":"workers-started","text":"workers started: rank 0 (pid 26503), 1 (pid 26504)","details":"{}","restart":0}');
INSERT INTO "events" VALUES(6,'{"number":6,"time":1795564251.2860923,"node_id":"node-a-70648c64","rank":-1,"step":-1,"kind":"master-joined","text":"master 127.0.0.1:39321: this node has joined (epoch 1)","details":"{}","restart":0}');
INSERT INTO "events" VALUES(7,'{"number":7,"time":1795564251.3021984,"node_id":"","rank":-1,"step":-1,"kind":"config","text":"version 4 of the config was written on node-a-70648c64: faster after all","details":"","restart":0}');
INSERT INTO "events" VALUES(8,'{"number":8,"time":1795564254.8828528,"node_id":"node-a-70648c64","rank":-1,"step":-1,"kind":"checkpoints","text":"checkpoints: /jobs/saved/storage","details":"{}","restart":0}');
INSERT INTO "events" VALUES(9,'{"number":9,"time":1795564253.783273,"node_id":"node-a-70648c64","rank":1,"step":0,"kind":"config-applied","text":"version 4 in force from step 0: optimizer.learning_rate 0.5 -> 0.25, user.note null -> \"one\" (faster after all)","details":"{\"version\": 4, \"revision\": 0, \"changes\": {\"optimizer.learning_rate\": [0.5, 0.25], \"user.note\": [null, \"one\"]}}","restart":0}');
INSERT INTO "events" VALUES(10,'{"number":10,"time":1795564253.7833412,"node_id":"node-a-70648c64","rank":0,"step":0,"kind":"config-applied","text":"version 4 in force from step 0: optimizer.learning_rate 0.5 -> 0.25, user.note null -> \"one\" (faster after all)","details":"{\"version\": 4, \"revision\": 0, \"changes\": {\"optimizer.learning_rate\": [0.5, 0.25], \"user.note\": [null, \"one\"]}}","restart":0}');
INSERT INTO "events" VALUES(11,'{"number":11,"time":1795564253.8573213,"node_id":"node-a-70648c64","rank":0,"step":0,"kind":"training-began","text":"training begins","details":"{\"global_batch_size\": 4, \"checkpoints\": \"/jobs/saved/storage\"}","restart":0}');
INSERT INTO "events" VALUES(12,'{"number":12,"time":1795564253.8580587,"node_id":"node-a-70648c64","rank":1,"step":0,"kind":"training-began","text":"training begins","details":"{\"global_batch_size\": 4, \"checkpoints\": \"/jobs/saved/storage\"}","restart":0}');
INSERT INTO "events" VALUES(13,'{"number":13,"time":1795564255.0968385,"node_id":"node-a-70648c64","rank":-1,"step":-1,"kind":"worker-failed","text":"rank 0 (local rank 0, pid 26503) on node-a exited with status 1: ValueError: negative loss\n    Traceback (most recent call last):\n      File \"/jobs/saved/job.py\", line 175, in <module>\n        main(Path(sys.argv[1]))\n      File \"/jobs/saved/job.py\", line 171, in main\n        raise ValueError(\"negative loss\")\n    ValueError: negative loss","details":"{\"rank\": 0, \"exit_code\": 1}","restart":0}');
INSERT INTO "events" VALUES(14,'{"number":14,"time":1795564255.0969775,"node_id":"node-a-70648c64","rank":-1,"step":-1,"kind":"worker-failed","text":"rank 1 (local rank 1, pid 26504) on node-a exited with status 1: ValueError: negative loss\n    Traceback (most recent call last):\n      File \"/jobs/saved/job.py\", line 175, in <module>\n        main(Path(sys.argv[1]))\n      File \"/jobs/saved/job.py\", line 171, in main\n        raise ValueError(\"negative loss\")\n    ValueError: negative loss","details":"{\"rank\": 1, \"exit_code\": 1}","restart":0}');
INSERT INTO "events" VALUES(15,'{"number":15,"time":1795564255.1069372,"node_id":"node-a-70648c64","rank":-1,"step":-1,"kind":"failed","text":"the job has failed, and no restart is left: rank 0 (local rank 0, pid 26503) on node-a exited with status 1: ValueError: negative loss\n    Traceback (most recent call last):\n      File \"/jobs/saved/job.py\", line 175, in <module>\n        main(Path(sys.argv[1]))\n      File \"/jobs/saved/job.py\", line 171, in main\n        raise ValueError(\"negative loss\")\n    ValueError: negative loss\n  and then: rank 1 on node-a exited with status 1","details":"{}","restart":0}');
INSERT INTO "events" VALUES(16,'{"number":16,"time":1795564255.1298358,"node_id":"node-a-70648c64","rank":-1,"step":-1,"kind":"node-left","text":"node node-a-70648c64 has left: it ends with status 1","details":"","restart":0}');
INSERT INTO "events" VALUES(17,'{"number":17,"time":1795564255.1313984,"node_id":"","rank":-1,"step":-1,"kind":"master","text":"the master ends","details":"","restart":0}');
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO "meta" VALUES('job','saved');
INSERT INTO "meta" VALUES('job_id','37cc02449cb04c9b90e786000f6c2c5e');
INSERT INTO "meta" VALUES('epoch','1');
INSERT INTO "meta" VALUES('membership','{"version":1,"nodes":[{"node_id":"node-a-26488-e8a5","host":"node-a","first_rank":0,"num_workers":2}],"reason":"the job starts","time":1795564251.2852366}');
INSERT INTO "meta" VALUES('pairs','');
CREATE TABLE nodes (node_id TEXT PRIMARY KEY, record TEXT NOT NULL);
INSERT INTO "nodes" VALUES('node-a-70648c64','{"node_id": "node-a-70648c64", "incarnation": 1795564250547277937, "host": "node-a", "pid": 26488, "library": "0.1.0", "started_at": 1795564250.5426664, "state": "left", "hardware": "{\"time\": 1795564250.5477633, \"cpu\": {\"model\": \"AMD EPYC\", \"num_logical\": 2, \"num_allowed\": 2, \"quota_cores\": null, \"num_numa_nodes\": 1}, \"memory\": {\"total_bytes\": 25276502016, \"available_bytes\": 24585867264, \"limit_bytes\": null, \"limit_free_bytes\": null, \"swap_total_bytes\": 0, \"swap_used_bytes\": 0}, \"gpus\": {\"trouble\": null, \"driver_version\": null, \"cuda_version\": null, \"num_on_bus\": 0, \"devices\": []}, \"network\": {\"host\": \"node-a\", \"host_addresses\": [\"127.0.0.1\"], \"interfaces\": []}, \"storage\": [], \"limits\": {\"open_files\": 20000, \"open_files_max\": 20000, \"locked_bytes\": 8388608, \"processes\": 96365}, \"system\": {\"kernel\": \"6.1.0\", \"boot_id\": \"0\", \"clock_source\": \"tsc\", \"in_container\": true}, \"versions\": {\"python\": \"3.11.7\", \"torch\": \"2.13.0+cpu\", \"torch_cuda\": null, \"is_torch_cuda_known\": true, \"numpy\": \"2.4.6\", \"elastic_ext\": \"0.1.0\"}}", "agent_id": "node-a-26488-e8a5"}');
CREATE TABLE pages (
    version INTEGER PRIMARY KEY, time REAL NOT NULL, author TEXT NOT NULL, node_id TEXT NOT NULL,
    restores INTEGER, text TEXT NOT NULL);
INSERT INTO "pages" VALUES(4,1.7955642513004808426e+09,'node','node-a-70648c64',NULL,'{
  "version": 4,
  "reason": "faster after all",
  "optimizer": {
    "learning_rate": 0.25
  },
  "user": {
    "note": "one"
  }
}
');
CREATE TABLE points (time REAL PRIMARY KEY, record TEXT NOT NULL);
COMMIT;
