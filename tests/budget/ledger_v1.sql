BEGIN TRANSACTION;
CREATE TABLE agentkv_fact (
	id INTEGER NOT NULL, 
	run VARCHAR(32) NOT NULL, 
	task TEXT NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	at_ms BIGINT NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "agentkv_fact" VALUES(1,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','run-7','task',1000,'{"task":"run-7","at_ms":1000,"event":"started","final":false}');
INSERT INTO "agentkv_fact" VALUES(2,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','run-7','model_call',1000,'{"task":"run-7","session":"run-7#1","node":"plan","branch":"b","attempt":1,"at_ms":1000,"model":"m","usage":{"input_tokens":100,"cached_tokens":40,"output_tokens":7,"calls":1},"timing":{"queued_s":0.0,"restore_s":0.0,"recompute_s":0.0,"prefill_s":0.0,"decode_s":0.25,"ttft_s":0.25,"total_s":0.5},"status":"ok","priority":1,"estimated":false,"visible":true,"purpose":"answer"}');
INSERT INTO "agentkv_fact" VALUES(3,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','run-7','tool_call',1005,'{"task":"run-7","session":"run-7#1","node":"","tool":"bash","command":"pytest","at_ms":1005,"predicted_p10_s":null,"predicted_p50_s":1.5,"predicted_p90_s":null,"actual_s":2.0,"status":"succeeded"}');
INSERT INTO "agentkv_fact" VALUES(4,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','run-7','move',1006,'{"task":"run-7","session":"run-7#1","at_ms":1006,"action":"demote","to":"host","blocks":3,"size_bytes":9000,"seconds":0.01,"outcome":"done","reason":""}');
INSERT INTO "agentkv_fact" VALUES(5,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','run-7','model_call',1010,'{"task":"run-7","session":"run-7#1","node":"plan","branch":"b","attempt":1,"at_ms":1010,"model":"m","usage":{"input_tokens":101,"cached_tokens":40,"output_tokens":7,"calls":1},"timing":{"queued_s":0.0,"restore_s":0.0,"recompute_s":0.0,"prefill_s":0.0,"decode_s":0.25,"ttft_s":0.25,"total_s":0.5},"status":"ok","priority":1,"estimated":false,"visible":null,"purpose":"answer"}');
INSERT INTO "agentkv_fact" VALUES(6,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','run-7','tool_call',1015,'{"task":"run-7","session":"run-7#1","node":"","tool":"bash","command":"pytest","at_ms":1015,"predicted_p10_s":null,"predicted_p50_s":1.5,"predicted_p90_s":null,"actual_s":2.0,"status":"succeeded"}');
INSERT INTO "agentkv_fact" VALUES(7,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','run-7','move',1016,'{"task":"run-7","session":"run-7#1","at_ms":1016,"action":"demote","to":"host","blocks":3,"size_bytes":9000,"seconds":0.01,"outcome":"done","reason":""}');
INSERT INTO "agentkv_fact" VALUES(8,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','run-7','context',1900,'{"task":"run-7","session":"","at_ms":1900,"event":"slim","name":"bash","cause":"log","before_tokens":900,"after_tokens":90,"seconds":0.0}');
INSERT INTO "agentkv_fact" VALUES(9,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','run-7','task',1999,'{"task":"run-7","at_ms":1999,"event":"finished","final":true}');
INSERT INTO "agentkv_fact" VALUES(10,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','it''s "quoted" \ <b>é</b>','task',2000,'{"task":"it''s \"quoted\" \\ <b>\u00e9</b>","at_ms":2000,"event":"started","final":false}');
INSERT INTO "agentkv_fact" VALUES(11,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','it''s "quoted" \ <b>é</b>','model_call',2000,'{"task":"it''s \"quoted\" \\ <b>\u00e9</b>","session":"it''s \"quoted\" \\ <b>\u00e9</b>#1","node":"plan","branch":"b","attempt":1,"at_ms":2000,"model":"m","usage":{"input_tokens":100,"cached_tokens":40,"output_tokens":7,"calls":1},"timing":{"queued_s":0.0,"restore_s":0.0,"recompute_s":0.0,"prefill_s":0.0,"decode_s":0.25,"ttft_s":0.25,"total_s":0.5},"status":"ok","priority":1,"estimated":false,"visible":true,"purpose":"answer"}');
INSERT INTO "agentkv_fact" VALUES(12,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','it''s "quoted" \ <b>é</b>','tool_call',2005,'{"task":"it''s \"quoted\" \\ <b>\u00e9</b>","session":"it''s \"quoted\" \\ <b>\u00e9</b>#1","node":"","tool":"bash","command":"pytest","at_ms":2005,"predicted_p10_s":null,"predicted_p50_s":1.5,"predicted_p90_s":null,"actual_s":2.0,"status":"succeeded"}');
INSERT INTO "agentkv_fact" VALUES(13,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','it''s "quoted" \ <b>é</b>','move',2006,'{"task":"it''s \"quoted\" \\ <b>\u00e9</b>","session":"it''s \"quoted\" \\ <b>\u00e9</b>#1","at_ms":2006,"action":"demote","to":"host","blocks":3,"size_bytes":9000,"seconds":0.01,"outcome":"done","reason":""}');
INSERT INTO "agentkv_fact" VALUES(14,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','it''s "quoted" \ <b>é</b>','context',2900,'{"task":"it''s \"quoted\" \\ <b>\u00e9</b>","session":"","at_ms":2900,"event":"slim","name":"bash","cause":"log","before_tokens":900,"after_tokens":90,"seconds":0.0}');
INSERT INTO "agentkv_fact" VALUES(15,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','it''s "quoted" \ <b>é</b>','task',2999,'{"task":"it''s \"quoted\" \\ <b>\u00e9</b>","at_ms":2999,"event":"finished","final":true}');
INSERT INTO "agentkv_fact" VALUES(16,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','run-7','task',5000,'{"task":"run-7","at_ms":5000,"event":"started","final":false}');
INSERT INTO "agentkv_fact" VALUES(17,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','run-7','model_call',5000,'{"task":"run-7","session":"run-7#1","node":"plan","branch":"b","attempt":1,"at_ms":5000,"model":"m","usage":{"input_tokens":100,"cached_tokens":40,"output_tokens":7,"calls":1},"timing":{"queued_s":0.0,"restore_s":0.0,"recompute_s":0.0,"prefill_s":0.0,"decode_s":0.25,"ttft_s":0.25,"total_s":0.5},"status":"ok","priority":1,"estimated":false,"visible":true,"purpose":"answer"}');
INSERT INTO "agentkv_fact" VALUES(18,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','run-7','tool_call',5005,'{"task":"run-7","session":"run-7#1","node":"","tool":"bash","command":"pytest","at_ms":5005,"predicted_p10_s":null,"predicted_p50_s":1.5,"predicted_p90_s":null,"actual_s":2.0,"status":"succeeded"}');
INSERT INTO "agentkv_fact" VALUES(19,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','run-7','move',5006,'{"task":"run-7","session":"run-7#1","at_ms":5006,"action":"demote","to":"host","blocks":3,"size_bytes":9000,"seconds":0.01,"outcome":"done","reason":""}');
INSERT INTO "agentkv_fact" VALUES(20,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','run-7','context',5900,'{"task":"run-7","session":"","at_ms":5900,"event":"slim","name":"bash","cause":"log","before_tokens":900,"after_tokens":90,"seconds":0.0}');
INSERT INTO "agentkv_fact" VALUES(21,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','run-7','task',5999,'{"task":"run-7","at_ms":5999,"event":"finished","final":true}');
CREATE TABLE agentkv_schema (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "agentkv_schema" VALUES(1,1);
CREATE INDEX agentkv_fact_task ON agentkv_fact (task, id);
COMMIT;
